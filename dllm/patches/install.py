"""Installs the plugin in a process of vLLM: registers our classes and patches vLLM.

What is derived is made for servers of ours alone, and every patch checks what is served: a model or
drafter that is not ours behaves as without the plugin. ``contract`` lists every name that is
touched, and why.
"""

import functools
from typing import Any

from vllm import platforms

from dllm.engine.derived import as_one_of
from dllm.models import AUTOREGRESSIVE, FAMILIES, own_configs
from dllm.patches.configure import set_batch_defaults
from dllm.patches.cpu import enable_cpu_runtime, is_cpu_without_triton, register_model
from dllm.patches.decoding import choose_model_config
from dllm.patches.drafting import DRAFTER_MODEL
from dllm.patches.neighbours import is_disabled
from dllm.patches.served import ByServer, Server, derives
from dllm.settings.drafting import OUR_DRAFTER

BUILTIN_ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"  # vLLM has a class for it, too
BUILTIN = "dllm.patches.builtin:TextOnlyDiffusionGemma"
ATTENTION_BACKEND = "dllm.attention.backend.CanvasAttentionBackend"


@functools.cache  # calling it again changes nothing
def install() -> None:
    """With DLLM_DISABLE=1 the CPU runtime alone: vLLM's DiffusionGemma and DFlash drafter stay."""
    from vllm.config import VllmConfig

    from dllm.patches.server_config import ServerConfig

    enable_cpu_runtime()
    derives(VllmConfig, ServerConfig)
    if not is_disabled():
        _serve_families()
        register_model(OUR_DRAFTER, DRAFTER_MODEL)
    elif is_cpu_without_triton():
        register_model(BUILTIN_ARCHITECTURE, BUILTIN)


def _serve_families() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Not loaded where vLLM's own classes serve.
    from dllm.patches.admission import begin_responses_once, explain_missing_images
    from dllm.patches.endpoints import add_endpoint_plugins
    from dllm.patches.serving import explain_threads

    if not platforms.current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, ATTENTION_BACKEND)
    # vLLM registers these classes with transformers only when it reads a config.json of theirs.
    _CONFIG_REGISTRY.update(own_configs())
    for architecture, served in FAMILIES.items():
        register_model(architecture, served.model_path())
        MODELS_CONFIG_MAP[architecture] = _config_hook(served.config_class())
    set_batch_defaults()
    for architecture, path in AUTOREGRESSIVE.items():
        register_model(architecture, path)
    choose_model_config()
    explain_missing_images()
    begin_responses_once()
    _derive_engines()
    explain_threads()
    add_endpoint_plugins()


def _derive_engines() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    from dllm.patches import admission, async_llm, engine_core, grammars, streaming

    def for_any(of_others: type, of_canvases: type, of_tokens: type | None = None) -> ByServer:
        of_tokens = of_tokens or of_others
        return {Server.CANVASES: of_canvases, Server.TOKENS: of_tokens, Server.TARGET: of_others}

    derives(AsyncLLM, for_any(async_llm.PreparingLLM, async_llm.CanvasLLM))
    derives(LLMEngine, for_any(grammars.PreparingEngine, grammars.CanvasEngine))
    inputs = admission.TargetInputs, admission.CanvasInputs, admission.TokenInputs
    derives(InputProcessor, for_any(*inputs))
    derives(AsyncMPClient, {Server.CANVASES: streaming.CanvasClient})
    derives(EngineCore, for_any(engine_core.DraftingCore, engine_core.CanvasCore))


def _config_hook(config: type | None) -> Any:
    """A class as MODELS_CONFIG_MAP holds it, in the place of vLLM's for an architecture.

    ``config``: transformers chooses the class by ``model_type``, which an architecture of ours may
    share with one of its own.
    """
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    class ConfigHook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            theirs = model_config.hf_config
            if config is not None and type(theirs) is not config:
                model_config.hf_config = as_one_of(config, theirs)
                if model_config.hf_text_config is theirs:
                    model_config.hf_text_config = model_config.hf_config

    return ConfigHook
