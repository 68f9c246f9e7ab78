"""LoRA adapters of a mixture's experts, for vLLM's layer of them.

That layer has the matrices of each expert's gate, up and down projection. On a GPU vLLM's kernels
read them, on a CPU ours (``adapted_experts``).
"""

from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.fused_moe import MoERunner, UnquantizedFusedMoEMethod

# In this order vLLM names the projections of an expert.
GATE, DOWN, UP = range(3)


def is_on_cpu(layer: nn.Module) -> bool:
    """Whether it is a mixture with vLLM's experts for a CPU, which are to be adapted first."""
    routed = getattr(layer, "routed_experts", None)
    if routed is None or not isinstance(routed.quant_method, UnquantizedFusedMoEMethod):
        return False
    return bool(routed.w2_weight.is_cpu) and not routed.quant_method.moe_kernel.supports_lora()


def takes_adapters(layer: nn.Module) -> bool:
    """Whether it is a mixture whose kernel knows adapters, or will; not of quantized weights."""
    if not isinstance(layer, MoERunner):
        return False
    kernel = getattr(layer.routed_experts.quant_method, "moe_kernel", None)
    knows = kernel is not None and not kernel.is_monolithic and kernel.supports_lora()
    return knows or is_on_cpu(layer)


def sizes_of(layer: Any, place: int) -> tuple[int, int]:
    """(columns, rows) of a projection, by its place among those of all experts."""
    config = layer.moe_config
    inner = config.intermediate_size_per_partition_unpadded * config.moe_parallel_config.tp_size
    sizes = config.hidden_dim_unpadded, inner
    return sizes[::-1] if place % 3 == DOWN else sizes


def take_apart(
    name: str, layer: FusedMoEWithLoRA, parts: list[str], loras: dict[str, LoRALayerWeights]
) -> None:
    """Make matrices of all experts those of each, in place; what has no change gets zeros.

    PEFT's ``target_parameters`` writes ``experts.base_layer`` and ``experts`` for gate_up_proj and
    down_proj: A ``[experts * rank, columns]`` and B ``[rows, rank * experts]``. Before PEFT 0.19.1
    they are those of the transposed weights, which is seen by their shapes. ``parts``: the
    projections' names, expert by expert. Raises ValueError: the matrices are of another model.
    """
    (hidden, inner), count = sizes_of(layer.base_layer, GATE), layer.global_num_experts
    places_of_sizes = {(hidden, 2 * inner): (GATE, UP), (inner, hidden): (DOWN,)}
    for stacked in (f"{name}.base_layer", name):
        if (lora := loras.pop(stacked, None)) is None:
            continue
        (depth, columns), (rows, width) = lora.lora_a.shape, lora.lora_b.shape
        is_turned = (columns, rows) not in places_of_sizes
        places = places_of_sizes.get((rows, columns) if is_turned else (columns, rows))
        if places is None or {depth, width} != {lora.rank * count}:
            raise ValueError(
                f"the adapter's matrices of {stacked} are {[depth, columns]} and {[rows, width]}; "
                f"of {count} experts at the rank of the adapter's config they have "
                f"{lora.rank * count} rows and columns, and this model has hidden states of "
                f"{hidden} and experts of {inner}."
            )
        a = lora.lora_a.unflatten(0, (count, -1))  # [experts, rank, columns]
        b = lora.lora_b.unflatten(1, (-1, count)).movedim(2, 0)  # [experts, rows, rank]
        a, b = (b.mT, a.mT) if is_turned else (a, b)
        for place, of_place in zip(places, b.chunk(len(places), dim=1), strict=True):
            for expert in range(count):
                part = parts[3 * expert + place]
                loras[part] = _weights(part, lora, a[expert], of_place[expert])
    given = [loras[part] for part in parts if part in loras]
    for place, part in enumerate(parts):
        if given and part not in loras:
            columns, rows = sizes_of(layer.base_layer, place)
            rank = given[0].lora_a.shape[0]
            zeros = given[0].lora_a.new_zeros(rank, columns), given[0].lora_b.new_zeros(rows, rank)
            loras[part] = _weights(part, given[0], *zeros)


def _weights(name: str, like: LoRALayerWeights, a: Tensor, b: Tensor) -> LoRALayerWeights:
    return LoRALayerWeights(
        name, a.shape[0], like.lora_alpha, a.contiguous(), b.contiguous(), like.scaling
    )
