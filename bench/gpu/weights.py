"""Weights of ``--load-format dummy`` with which a model computes what a trained one does.

vLLM's are at most 0.001, also those of norms and of the scalars of layers. With them the hidden
states of a Gemma 4 are zero behind a few layers, and all rows choose the same experts, whose
weights are then all that is read. Here matrices are normal, and norms and scalars 1.
"""

import re

import torch
from torch import Tensor, nn

ONES = re.compile(r"(layer_scalar|head_scalars|canvas_scalars|per_expert_scale|scale)$")
# Attention adds little to a row, or the mean of all keys would make all rows the same.
SMALL, SHARE = "post_attention_layernorm", 0.1
STD = 0.02
STRIDE = 7_654_321  # so that no two tensors begin with the same numbers


def compute_with_dummy_weights() -> None:
    """Let vLLM's dummy loader, of this process, fill models with ``fill``."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)  # type: ignore[method-assign]


def fill(model: nn.Module) -> None:
    """Fill the parameters and buffers of a model in place; the same each time."""
    draws: dict[torch.device, Draws] = {}
    for layer in model.modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is None or not torch.is_floating_point(tensor):
                continue
            if name in layer._non_persistent_buffers_set:  # computed, not loaded
                continue
            if name.endswith("weight_scale"):  # of an FP8 weight
                tensor.data.fill_(STD)
            elif tensor.dim() < 2 or ONES.search(name):
                tensor.data.fill_(1.0)
            else:
                if tensor.device not in draws:
                    draws[tensor.device] = Draws(tensor.device)
                draws[tensor.device].fill(tensor.data)
    for name, parameter in model.named_parameters():
        if SMALL in name:
            parameter.data.fill_(SHARE)


class Draws:
    """Normal numbers of a device, drawn once: 26B of them would take a minute."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(7)
        size = 1 << (26 if device.type == "cuda" else 20)
        self._numbers = torch.randn(size, generator=generator, device=device)
        self._of_type: dict[torch.dtype, Tensor] = {}
        self._start = 0

    def fill(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor; one of FP8 has its scale beside it."""
        if tensor.dtype not in self._of_type:
            unit = 1.0 if tensor.dtype.itemsize == 1 else STD
            self._of_type[tensor.dtype] = (self._numbers * unit).to(tensor.dtype)
        numbers, flat, at = self._of_type[tensor.dtype], tensor.view(-1), 0
        while at < len(flat):
            self._start = (self._start + STRIDE) % (len(numbers) // 2)
            count = min(len(numbers) - self._start, len(flat) - at)
            flat[at : at + count].copy_(numbers[self._start : self._start + count])
            at += count
