"""Checkpoint names: the reference's encoder and decoder halves become one set of weights.

Hugging Face ties every weight of the two halves except the per-layer buffer ``layer_scalar``. A
checkpoint may carry one copy or both. Two copies are accepted only if they agree: averaging or
picking one silently would serve a model that nobody trained.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set

import torch

ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."
# What load_weights sees of the two layer scalars, stacked over the layers: [layers].
HEAD_SCALARS = "model.decoder.head_scalars"
CANVAS_SCALARS = "model.decoder.canvas_scalars"

# vLLM's parameters of a layer's experts, and what a checkpoint calls the same for all experts or
# for each of them.
EXPERT_PARAMETER = re.compile(r"(.*\.experts\.)routed_experts\.(w13|w2)_(\w+)")
EXPERT_PROJECTIONS = {
    "w13": ("gate_up_proj", ("gate_proj", "up_proj")),
    "w2": ("down_proj", ("down_proj",)),
}
# Of a quantized KV cache: 1 unless the checkpoint says otherwise. Of experts' inputs: vLLM has the
# parameter also where inputs are not quantized; where they are, ``quant.loading`` asks for it.
OPTIONAL_SCALES = re.compile(
    r"\.attn\.([qkv]_(scale|zero_point)|prob_scale)$|\.routed_experts\.w\d+_input_global_scale$"
)


def merge_shared_copies(
    weights: Iterable[tuple[str, torch.Tensor]], num_layers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each shared weight once, under its decoder name, then the two stacks of layer scalars.

    A layer scalar that only one half carries counts for both.

    Args:
        weights: (checkpoint name, tensor) pairs; names outside the two halves pass unchanged.
        num_layers: length of the layer-scalar stacks.

    Raises:
        ValueError: at the end of the stream, when the copies of a weight differ.
    """
    scalars: dict[str, torch.Tensor] = {}
    digests: dict[str, tuple[object, ...]] = {}
    differing: list[str] = []
    for name, tensor in weights:
        half = next((prefix for prefix in (ENCODER, DECODER) if name.startswith(prefix)), None)
        if name.endswith(".layer_scalar"):
            scalars[name] = tensor.reshape(())
            continue
        if half is None:
            yield name, tensor
            continue
        shared_name = DECODER + name.removeprefix(half)
        digest = _digest(tensor)
        if shared_name not in digests:
            digests[shared_name] = digest
            yield shared_name, tensor
        elif digests[shared_name] != digest:
            differing.append(name.removeprefix(half))
    if differing:
        raise ValueError(
            "the checkpoint carries an encoder and a decoder copy of shared weights, and they "
            f"differ: {', '.join(sorted(differing))}. Save the model with tied weights, or drop "
            f"the {ENCODER}* copy if the {DECODER}* one is meant."
        )
    yield HEAD_SCALARS, _stack_scalars(scalars, (ENCODER, DECODER, "model."), num_layers)
    yield CANVAS_SCALARS, _stack_scalars(scalars, (DECODER, "model.", ENCODER), num_layers)


def refuse_missing(
    parameters: Iterable[str],
    filled: Set[str],
    stacked: Mapping[str, tuple[str, object]],
    num_experts: int | None,
) -> None:
    """Refuse a checkpoint that leaves a parameter, or a part of a stacked one, uninitialized.

    vLLM's own check exempts every linear layer, embedding and expert, and takes a stacked
    parameter for loaded when one of its parts was.

    Args:
        parameters: names of the model's parameters.
        filled: names that the checkpoint filled: of parameters or of parts of stacked ones.
        stacked: part -> (stacked name, shard), as in ``WeightsMapper.orig_to_new_stacked``.
        num_experts: of a layer, whose parameters stack theirs; None: there are none.

    Raises:
        ValueError: naming the missing tensors as the checkpoint would.
    """
    missing = []
    for name in parameters:
        if OPTIONAL_SCALES.search(name):
            continue
        parts = [name.replace(new, old) for old, (new, _) in stacked.items() if new in name]
        parts = parts or _parts_of_experts(name, filled, num_experts or 0) or [name]
        missing += [part for part in parts if part not in filled]
    if missing:
        names = sorted(_checkpoint_name(name) for name in missing)
        raise ValueError(
            f"the checkpoint misses {', '.join(names)}. Download or save it again: these weights "
            "would be served with whatever is in memory."
        )


def _parts_of_experts(name: str, filled: Set[str], num_experts: int) -> list[str]:
    """What a checkpoint calls the parts of a parameter that stacks all experts of a layer.

    One tensor for all experts (bf16), or one for each of them (quantized).
    """
    match = EXPERT_PARAMETER.fullmatch(name)
    if match is None:
        return []
    experts, projection, rest = match.groups()
    fused, split = EXPERT_PROJECTIONS[projection]
    of_each = [f"{experts}{i}.{part}.{rest}" for i in range(num_experts) for part in split]
    is_fused = rest == "weight" and not any(part in filled for part in of_each)
    return [f"{experts}{fused}"] if is_fused else of_each


def _checkpoint_name(name: str) -> str:
    if name.startswith("lm_head."):
        return name
    if name.startswith(("vision_tower.", "embed_vision.")):
        return f"model.encoder.{name}"
    return DECODER + name.removeprefix("model.")


def _stack_scalars(
    scalars: dict[str, torch.Tensor], prefixes: tuple[str, ...], num_layers: int
) -> torch.Tensor:
    """``layer_scalar`` of every layer, from the first prefix that carries it, else 1: [layers]."""
    one = torch.ones(())
    rows = []
    for layer in range(num_layers):
        names = [f"{prefix}layers.{layer}.layer_scalar" for prefix in prefixes]
        rows.append(next((scalars[name].float() for name in names if name in scalars), one))
    return torch.stack(rows)


def _digest(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, dtype and the CRC-32 of the bytes, in one pass at 3.7 GB/s.

    Equal for equal tensors. Changes within 32 adjacent bits always tell; others with 1 - 2**-32.
    """
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.dtype, zlib.crc32(data.numpy().data)
