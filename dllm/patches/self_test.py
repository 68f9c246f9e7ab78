"""Before a GPU serves: every kernel of ours beside its definition, and nothing wrong is used.

A kernel that this compiler or GPU gets wrong makes wrong tokens, not an error.
"""

from typing import Any

import torch
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.attention.choice import OURS, TRITON
from dllm.engine.attention_layers import Layer, layers_of
from dllm.models import settings_of
from dllm.ops.dispatch import WRONG_KERNELS
from dllm.patches.configure import flash_layers
from dllm.settings.server import PluginOptions

logger = init_logger(LOGGER)

OPTION = """--additional-config '{"dllm": {"self_test": false}}'"""
OFF = f"{OPTION} serves without this test."


def replace_wrong_kernels(vllm_config: Any, device: torch.device) -> None:
    """Run the checks of ``engine.kernel_checks``; something else takes the place of what is wrong.

    Of our attention kernel: vLLM's Triton backend. Of FlashAttention: our kernel. Of row
    statistics: their definition. Of the kernels of grammars: the CPU's version.

    Raises:
        RuntimeError: our attention kernel is wrong, and vLLM's backends cannot serve this model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.engine.kernel_checks import ATTENTION, FLASH, checks  # needs Triton

    if not PluginOptions.from_vllm(vllm_config).self_test:
        return
    attention = vllm_config.attention_config
    for name, wrong in checks(*layers_to_check(vllm_config), device):
        if not wrong:
            continue
        instead = "its definition"
        if name.startswith(ATTENTION):
            try:
                flash_layers(vllm_config, settings_of(vllm_config), TRITON)
            except ValueError as error:
                raise RuntimeError(
                    f"The kernel of {name} is wrong on this GPU ({wrong}), and no other backend "
                    f"can serve this model. Please report it. {OFF}"
                ) from error
            attention.backend, instead = AttentionBackendEnum.TRITON_ATTN, TRITON
        elif name.startswith(FLASH):
            attention.flash_attn_version, instead = None, "our own kernel"
        else:
            WRONG_KERNELS.add(name)
        logger.error(
            "dllm: the kernel of %s is wrong on this GPU (%s): %s serves. Please report it.",
            name,
            wrong,
            instead,
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM measures what is left


def layers_to_check(vllm_config: Any) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """The attention layers that our kernel serves, and those that FlashAttention serves, too."""
    settings, attention = settings_of(vllm_config), vllm_config.attention_config
    if attention.backend is None or attention.backend.name != OURS:
        return {}, {}
    has_flash = attention.flash_attn_version == 4
    flash = flash_layers(vllm_config, settings, None if has_flash else OURS)
    return layers_of(vllm_config, settings), flash
