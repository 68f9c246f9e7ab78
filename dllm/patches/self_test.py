"""Before a GPU serves: every kernel of ours beside its definition, and nothing wrong is used.

A kernel that this compiler or GPU gets wrong makes wrong tokens, not an error.
"""

from typing import Any

import torch
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.models import settings_of
from dllm.ops.dispatch import WRONG_KERNELS
from dllm.settings.server import PluginOptions

logger = init_logger(LOGGER)

OPTION = """--additional-config '{"dllm": {"self_test": false}}'"""
OFF = f"{OPTION} serves without this test."


def replace_wrong_kernels(vllm_config: Any, device: torch.device) -> None:
    """Run the checks of ``engine.kernel_checks``; something else takes the place of what is wrong.

    Of our attention kernel: vLLM's Triton backend. Of row statistics: their definition. Of the
    kernels of grammars: the CPU's version.

    Raises:
        RuntimeError: our attention kernel is wrong, and vLLM's backends cannot serve this model.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dllm.engine.kernel_checks import ATTENTION, checks, layers_of  # needs Triton

    if not PluginOptions.from_vllm(vllm_config).self_test:
        return
    settings, attention = settings_of(vllm_config), vllm_config.attention_config
    is_ours = attention.backend == AttentionBackendEnum.CUSTOM
    layers = layers_of(vllm_config, settings) if is_ours else {}
    for name, wrong in checks(layers, device):
        if not wrong:
            continue
        instead = "its definition"
        if name.startswith(ATTENTION):
            if settings.block_size > 1 or settings.canvas_window == "anchored":
                raise RuntimeError(
                    f"The kernel of {name} is wrong on this GPU ({wrong}), and no other backend "
                    f"can serve this model. Please report it. {OFF}"
                )
            attention.backend = AttentionBackendEnum.TRITON_ATTN
            instead = "TRITON_ATTN"
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
