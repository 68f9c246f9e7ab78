"""Installs the plugin in a process of vLLM: registers our classes and patches vLLM.

Every patch checks what is served: a model or drafter that is not ours behaves as without the
plugin. ``contract`` lists every name that is touched, and why.
"""

import functools
from typing import Any

from dllm.models import FAMILIES, own_configs
from dllm.patches.configure import set_batch_defaults
from dllm.patches.cpu import enable_cpu_runtime, is_cpu_without_triton, register_model
from dllm.patches.decoding import serve_decodings
from dllm.patches.drafting import serve_drafters
from dllm.patches.kinds import configure_servers
from dllm.patches.neighbours import is_disabled

BUILTIN_ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"  # vLLM has a class for it, too
BUILTIN = "dllm.patches.builtin:TextOnlyDiffusionGemma"
ATTENTION_BACKEND = "dllm.attention.backend.CanvasAttentionBackend"


@functools.cache  # calling it again changes nothing
def install() -> None:
    """With DLLM_DISABLE=1 the CPU runtime alone: vLLM's DiffusionGemma and DFlash drafter stay."""
    enable_cpu_runtime()
    configure_servers()
    if not is_disabled():
        _serve_families()
        serve_drafters()
    elif is_cpu_without_triton():
        register_model(BUILTIN_ARCHITECTURE, BUILTIN)


def _serve_families() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Not loaded where vLLM's own classes serve.
    from dllm.patches.admission import check_requests_at_admission
    from dllm.patches.async_llm import check_requests_early, start_in_turn
    from dllm.patches.endpoints import add_endpoint_plugins
    from dllm.patches.grammars import serve_structured_outputs
    from dllm.patches.serving import serve_with_ours
    from dllm.patches.streaming import take_frames_out

    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    # vLLM registers these classes with transformers only when it reads a config.json of theirs.
    _CONFIG_REGISTRY.update(own_configs())
    for architecture, served in FAMILIES.items():
        register_model(architecture, served.model_path())
        MODELS_CONFIG_MAP[architecture] = _config_hook(served.config_class())
    set_batch_defaults()
    serve_decodings()
    check_requests_at_admission()
    serve_structured_outputs()
    check_requests_early()
    start_in_turn()
    serve_with_ours()
    add_endpoint_plugins()
    take_frames_out()


def _config_hook(config: type | None) -> Any:
    """A class as MODELS_CONFIG_MAP holds it, in the place of vLLM's for an architecture.

    ``config``: transformers chooses the class by ``model_type``, which an architecture of ours may
    share with one of its own.
    """
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    class ConfigHook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if config is not None:
                model_config.hf_config.__class__ = config

    return ConfigHook
