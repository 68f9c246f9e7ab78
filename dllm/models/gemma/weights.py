"""Loading of checkpoints: the reference's encoder and decoder become one set of weights.

In Hugging Face's model the encoder and the decoder share all weights except ``layer_scalar``, one
number per layer. A checkpoint holds the shared weights once or twice. Two copies must be equal: if
they differ, nobody can know which one is meant, so the checkpoint is refused.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import torch
from safetensors import safe_open

ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."
# Names under which the layer scalars of all layers are passed on, as one tensor [layers] each.
HEAD_SCALARS = "model.decoder.head_scalars"
CANVAS_SCALARS = "model.decoder.canvas_scalars"

# vLLM's names for the parameters of a layer's experts, and a checkpoint's names for the same: first
# for one tensor that holds all experts, then for the tensors of a single expert.
EXPERT_PARAMETER = re.compile(r"(.*\.experts\.)routed_experts\.(w13|w2)_(\w+)")
EXPERT_PROJECTIONS = {
    "w13": ("gate_up_proj", ("gate_proj", "up_proj")),
    "w2": ("down_proj", ("down_proj",)),
}
# Parameters that a checkpoint may leave out. Scales of a quantized KV cache are 1 by default. vLLM
# has input scales of experts also where inputs are not quantized; where inputs are quantized,
# ``quant.checks`` requires these scales.
OPTIONAL_SCALES = re.compile(
    r"\.attn\.([qkv]_(scale|zero_point)|prob_scale)$|\.routed_experts\.w\d+_input_global_scale$"
)


def checkpoint_names(model: str, revision: str | None) -> set[str] | None:
    """The names of a checkpoint's tensors, from the headers of its safetensors files.

    ``model``: a folder, or a model of Hugging Face's hub that has been downloaded. None if there
    are no such files where vLLM keeps models by default.
    """
    from vllm.transformers_utils.repo_utils import try_get_local_file

    folder = Path(model)
    if not folder.is_dir():
        config = try_get_local_file(model, "config.json", revision or "main")
        if not isinstance(config, Path):
            return None
        folder = config.parent
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    return names or None


class LayerScalars:
    """A trainer may send new weights one by one, in any number of calls of ``load_weights``."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._num_expected = 0  # when a model is loaded first, whatever comes is all
        self._came: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._came[name] = tensor.reshape(())

    def take(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Two tensors ``[num_layers]``, if as many scalars have come as the first time.

        If a layer has a scalar only for the encoder, or only for the decoder, it counts for both;
        without one it is 1.
        """
        if len(self._came) < self._num_expected:
            return
        yield HEAD_SCALARS, self._stacked(ENCODER, DECODER, "model.")
        yield CANVAS_SCALARS, self._stacked(DECODER, "model.", ENCODER)
        self._num_expected = len(self._came) or self._num_layers
        self._came = {}

    def _stacked(self, *prefixes: str) -> torch.Tensor:
        """Of all layers, each by the first of the prefixes that has one."""
        device = next((scalar.device for scalar in self._came.values()), None)
        one = torch.ones((), device=device)
        rows = []
        for layer in range(self._num_layers):
            names = [f"{prefix}layers.{layer}.layer_scalar" for prefix in prefixes]
            rows.append(next((self._came[n].float() for n in names if n in self._came), one))
        return torch.stack(rows)


def merge_shared_copies(
    weights: Iterable[tuple[str, torch.Tensor]],
    scalars: LayerScalars,
    names: Iterable[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each shared weight once, under its decoder name, and last the layer scalars.

    Args:
        weights: pairs that belong to neither encoder nor decoder are passed on unchanged.
        names: of all tensors that will come, if known. Then only weights that come twice are read
            for comparison. Without them all are, which takes 14 s for 52 GB.

    Raises:
        ValueError: after the last weight, if two copies of a weight differ, or if a weight comes
            twice that ``names`` has once.
    """
    digests: dict[str, tuple[object, ...] | None] = {}
    comes_twice = None if names is None else _shared_twice(names)
    differing: list[str] = []
    for name, tensor in weights:
        shared_name = _shared_name(name)
        if name.endswith(".layer_scalar"):
            scalars.add(name, tensor)
            continue
        if shared_name is None:
            yield name, tensor
        elif shared_name not in digests:
            is_compared = comes_twice is None or shared_name in comes_twice
            digests[shared_name] = _digest(tensor) if is_compared else None
            yield shared_name, tensor
        elif digests[shared_name] != _digest(tensor):
            differing.append(shared_name.removeprefix(DECODER))
    if differing:
        raise ValueError(
            "the checkpoint carries an encoder and a decoder copy of shared weights, and they "
            f"differ: {', '.join(sorted(differing))}. Save the model with tied weights, or drop "
            f"the {ENCODER}* copy if the {DECODER}* one is meant."
        )
    yield from scalars.take()


def refuse_missing(
    parameters: Iterable[str],
    filled: Set[str],
    stacked: Mapping[str, tuple[str, object]],
    num_experts: int | None,
) -> None:
    """Refuse a checkpoint that does not fill every parameter, and every part of a stacked one.

    vLLM stacks several weights into one parameter, for example q, k and v, or all experts. vLLM's
    own check skips linear layers, embeddings and experts, and counts a stacked parameter as loaded
    if one of its parts was.

    Args:
        filled: names of parameters, or of parts of stacked ones.
        stacked: part -> (stacked name, shard), as in ``WeightsMapper.orig_to_new_stacked``.

    Raises:
        ValueError: it lists the missing tensors by their names in a checkpoint.
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
    """A checkpoint's names for the parts of a parameter that holds all experts of a layer.

    One name if the checkpoint has one tensor for all experts (bf16), else the names for each expert
    (quantized). Empty if the parameter is not one of experts.
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


def _shared_name(name: str) -> str | None:
    """The decoder's; None for weights that are not shared."""
    for prefix in (ENCODER, DECODER):
        if name.startswith(prefix):
            return DECODER + name.removeprefix(prefix)
    return None


def _shared_twice(names: Iterable[str]) -> set[str]:
    """The decoder's names of weights that are there for both halves."""
    counts = Counter(_shared_name(name) for name in names)
    return {name for name, count in counts.items() if name is not None and count > 1}


def _digest(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for equal tensors: shape, dtype and the CRC-32 of the bytes.

    It differs for tensors that differ within 32 adjacent bits, and for others with probability 1 -
    2**-32. One core computes it at 3.7 GB/s.
    """
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.dtype, zlib.crc32(data.numpy().data)
