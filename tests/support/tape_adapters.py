"""Adapters on a tape: vLLM's wrapper of a GPU, and its kernels in Triton's interpreter."""

import functools
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language
import vllm.triton_utils

from dllm.engine import adapters
from tests.support import tape


class OfHost(NamedTuple):
    """A tensor of one number in the host's memory, for which nobody waits."""

    value: int

    def numel(self) -> int:
        return 1

    def item(self) -> int:
        return self.value


@functools.cache
def adapt_as_on_gpu() -> None:
    """Let engines that are made from here on adapt rows as on a GPU, with numbers of 32 bits."""
    real = {"HAS_TRITON": True, "triton": triton, "tl": triton.language}
    with mock.patch.multiple(vllm.triton_utils, **real):
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
        from vllm.lora.punica_wrapper import punica_gpu

    meta_args, configs = LoRAKernelMeta.meta_args, lora_shrink_op.get_lora_op_configs

    def args_of_tape(self: Any, *given: Any) -> Any:
        *device, is_unused, num_adapters = meta_args(self, *given)
        with tape.unseen():
            return *device, OfHost(is_unused.item()), OfHost(num_adapters.item())

    wide = ModuleType("torch")
    vars(wide).update(vars(torch), float16=torch.float32)  # which the kernels refuse
    for module in (lora_expand_op, lora_shrink_op):
        module.torch = wide
    LoRAKernelMeta.meta_args = args_of_tape
    # Each part of a sum is a program of its own, of which the interpreter runs one at a time.
    lora_shrink_op.get_lora_op_configs = lambda *given, **more: (
        configs(*given, **more) | {"split_k": 1}
    )
    punica_gpu.lora_shrink = lora_shrink_op._lora_shrink
    punica_gpu.lora_expand = lora_expand_op._lora_expand
    adapters.PunicaByRuns = punica_gpu.PunicaWrapperGPU
