"""Experts of a mixture with LoRA adapters on a CPU, for which vLLM has no kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from dllm.engine.derived import as_one_of, of_both
from dllm.quant.cpu_experts import ACTIVATIONS, Experts


@dataclass(frozen=True)
class ChangedExperts(Experts):
    """Experts with an adapter: A ``[experts, rank, columns]``, B ``[experts, rows, rank]``."""

    gate_change: tuple[Tensor, Tensor]
    up_change: tuple[Tensor, Tensor]
    down_change: tuple[Tensor, Tensor]

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        def projected(x: Tensor, weight: Tensor, change: tuple[Tensor, Tensor]) -> Tensor:
            a, b = change
            return F.linear(x, weight) + F.linear(F.linear(x, a[expert]), b[expert])

        gate, up = self.gate_up[expert].chunk(2)
        hidden = self.activation(projected(tokens, gate, self.gate_change))
        hidden = hidden * projected(tokens, up, self.up_change)
        return projected(hidden, self.down[expert], self.down_change)


class AdaptedExperts(LoRAExpertsMixin):
    """In front of a class of vLLM's experts for a CPU, which packs their weights.

    The weights are kept as they were, too: an adapter changes what is between two projections.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """For new weights."""
        self._plain = layer.w13_weight.detach().clone(), layer.w2_weight.detach().clone()
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply(self, output: Tensor, hidden_states: Tensor, *args: Any, **options: Any) -> None:
        """Rows with an adapter are computed first: ``output`` may be ``hidden_states``."""
        changed = [*self._changed_rows(hidden_states, **options)]
        super().apply(output, hidden_states, *args, **options)  # type: ignore[misc]
        for rows, values in changed:
            output[rows] = values

    def _changed_rows(
        self,
        tokens: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        expert_map: Tensor | None,
        **unused: Any,
    ) -> Iterator[tuple[slice, Tensor]]:
        context = self._lora_context
        if context is None or context.punica_wrapper.no_lora:
            return
        if expert_map is not None:  # from the model's numbers of experts to this rank's
            topk_ids = expert_map[topk_ids.long()]
        runs = (one.tolist() for one in context.punica_wrapper.prefill_metadata[:3])
        for start, length, adapter in zip(*runs, strict=True):
            if adapter >= 0 and context.adapter_enabled[adapter]:
                rows = slice(start, start + length)
                experts = self._changed(adapter, activation.value)
                yield rows, experts(tokens[rows], topk_weights[rows], topk_ids[rows])

    def _changed(self, adapter: int, activation: str) -> ChangedExperts:
        context: Any = self._lora_context
        gate, up = (
            (a[adapter], b[adapter])
            for a, b in zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)
        )
        down = context.w2_lora_a_stacked[0][adapter], context.w2_lora_b_stacked[0][adapter]
        return ChangedExperts(
            *self._plain, None, None, None, ACTIVATIONS[activation], gate, up, down
        )


def adapt(layer: Any) -> None:
    """Let the experts of a CPU take adapters; their weights are packed already."""
    kernel = layer.quant_method.moe_kernel.impl
    kind: Any = type(kernel.fused_experts)
    config = kernel.fused_experts.moe_config
    inner, hidden = kind._padded_intermediate_size(config), config.hidden_dim
    experts = as_one_of(of_both(AdaptedExperts, kind), kernel.fused_experts)
    kernel.fused_experts = experts
    gate_up = unpacked(layer.w13_weight, (2 * inner, hidden), kind.isa).unflatten(1, (2, inner))
    down = unpacked(layer.w2_weight, (hidden, inner), kind.isa)
    inner = config.intermediate_size_per_partition
    experts._plain = gate_up[:, :, :inner].flatten(1, 2), down[..., :inner].contiguous()


def unpacked(packed: Tensor, shape: tuple[int, int], isa: str) -> Tensor:
    """Weights ``[experts, *shape]`` before `cpu_prepack_moe_weight`, which only moves numbers."""
    as_numbers = {2: torch.int16, 4: torch.int32}[packed.element_size()]
    place = torch.zeros(2, *shape, dtype=as_numbers)
    place[0] = torch.arange(shape[0])[:, None]
    place[1] = torch.arange(shape[1])
    rows, columns = cpu_prepack_moe_weight(place.view(packed.dtype), isa).view(as_numbers).long()
    plain = torch.empty(len(packed), *shape, dtype=packed.dtype)
    plain[:, rows.flatten(), columns.flatten()] = packed.flatten(1)
    return plain
