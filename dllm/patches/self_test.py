"""Before a GPU serves: every kernel of ours beside its definition, and nothing wrong is used.

A kernel that this compiler or GPU gets wrong makes wrong tokens, not an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.attention.choice import OURS, TRITON
from dllm.attention.inputs import Layer
from dllm.engine.attention_layers import layers_of, on_one_gpu
from dllm.engine.ranks import all_ranks_say_yes
from dllm.models import settings_of
from dllm.ops.dispatch import CONTEXT_KV, WRONG_KERNELS
from dllm.patches.configure import flash_layers
from dllm.settings.server import options_of

logger = init_logger(LOGGER)

OPTION = """--additional-config '{"dllm": {"self_test": false}}'"""
OFF = f"{OPTION} serves without this test."


def replace_wrong_kernels(vllm_config: Any, device: torch.device) -> None:
    """Run the checks of ``engine.kernel_checks``, and replace kernels that are wrong.

    Our attention kernel is replaced by vLLM's Triton backend, FlashAttention by our kernel, row
    statistics and soft embeddings by their definitions, and the kernels of grammars by the CPU's
    version. Raises RuntimeError if our attention kernel is wrong, and vLLM's backends cannot serve
    this model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.engine.kernel_checks import ATTENTION, FLASH, canvas_trials

    attention = vllm_config.attention_config

    def replace(name: str, wrong: str) -> str:
        if name.startswith(ATTENTION):
            try:
                flash_layers(vllm_config, TRITON)
            except ValueError as error:
                raise _no_other(name, wrong) from error
            attention.backend = AttentionBackendEnum.TRITON_ATTN
            return TRITON
        if name.startswith(FLASH):
            attention.flash_attn_version = None
            return "our own kernel"
        WRONG_KERNELS.add(name)
        return "its definition"

    if options_of(vllm_config).self_test:
        _run(canvas_trials(*layers_to_check(vllm_config), device), replace, device)


def replace_wrong_drafter_kernels(vllm_config: Any, device: torch.device) -> None:
    """If attention is wrong, vLLM chooses another; vLLM's operations serve for a wrong context.

    Raises RuntimeError if our attention kernel is wrong, and no other has the drafter's window.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.drafter.cache import with_own_cache
    from dllm.drafter.pair import drafter_config
    from dllm.engine.kernel_checks import ATTENTION, attention_trials, drafter_context

    options = options_of(vllm_config)
    drafter, speculative = drafter_config(vllm_config), vllm_config.speculative_config
    dtype = speculative.draft_model_config.dtype
    sizes = drafter.num_heads, drafter.num_kv_heads, drafter.head_dim
    layers = {
        f"draft layers {index}": on_one_gpu(
            Layer(*sizes, each.mask, dtype), with_own_cache(vllm_config)
        )
        for index, each in enumerate(dict.fromkeys(drafter.layers))
        if speculative.attention_backend == AttentionBackendEnum.CUSTOM
    }
    trials = attention_trials(layers, device)
    if options.drafter.fused_context:
        layer, is_neox = next(iter(layers.values())), drafter.is_neox_style is not False
        trials[CONTEXT_KV] = lambda: drafter_context(layer, drafter.hidden_size, is_neox, device)

    def replace(name: str, wrong: str) -> str:
        if not name.startswith(ATTENTION):
            WRONG_KERNELS.add(name)
            return "vLLM's"
        if any(layer.mask.is_anchored for layer in drafter.layers):
            raise _no_other(name, wrong)
        speculative.attention_backend = None
        return "vLLM's"

    if options.self_test:
        _run(trials, replace, device)


def _run(trials: Any, replace: Callable[[str, str], str], device: torch.device) -> None:
    """``replace`` replaces a kernel that is wrong on any rank, and returns a text that says how: a
    kernel that only some ranks replaced would give them other tokens than the rest.
    """
    from dllm.engine.kernel_checks import checks  # needs Triton

    for name, wrong in checks(trials):
        if not all_ranks_say_yes(not wrong):
            logger.error(
                "dllm: the kernel of %s is wrong on this GPU (%s): %s serves. Please report it.",
                name,
                wrong or "on another rank",
                replace(name, wrong),
            )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM measures what is left


def _no_other(name: str, wrong: str) -> RuntimeError:
    return RuntimeError(
        f"The kernel of {name} is wrong on this GPU ({wrong}), and no other backend can serve this "
        f"model. Please report it. {OFF}"
    )


def layers_to_check(vllm_config: Any) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """Those that our kernel serves, and those that FlashAttention serves, too."""
    attention = vllm_config.attention_config
    if attention.backend is None or attention.backend.name != OURS:
        return {}, {}
    from dllm.attention.flash import option_of  # imports vLLM's attention backends

    flash = flash_layers(vllm_config, option_of(attention))
    return layers_of(vllm_config, settings_of(vllm_config)), flash
