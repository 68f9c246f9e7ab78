"""A checkpoint, cut into groups of layers that are quantized and written one at a time."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dllm.quantize.checkpoint import Checkpoint, byte_size, few
from dllm.quantize.linears import Linear, by_one_name, layer_number, linears, text_shapes
from dllm.quantize.recipes import Recipe
from dllm.settings.command import CommandError
from quant.checks import implausible_scale, is_scale, layer_problems, scale_problem
from quant.schemes import Scheme

Tensors = dict[str, torch.Tensor]
# Weights of layers that are fused, by module -> what the files hold of each, by suffix. The second
# argument is the static scale of their inputs, which they share, if the scheme has one.
QuantizeFused = Callable[[Tensors, torch.Tensor | None], dict[str, Tensors]]


@dataclass(frozen=True)
class Group:
    """What becomes one file.

    Attributes:
        label: what a progress line calls it.
        kept: names of the tensors that are copied, as they will be called -> as they are called.
        layers: the linear layers that are quantized.
    """

    label: str
    kept: Mapping[str, str]
    layers: tuple[Linear, ...]

    def fused(self) -> list[list[Linear]]:
        """The layers, those that vLLM makes one of together."""
        sets: dict[str, list[Linear]] = defaultdict(list)
        for layer in self.layers:
            sets[layer.fused].append(layer)
        return list(sets.values())


def groups_of(source: Checkpoint, recipe: Recipe) -> list[Group]:
    """What stands outside the layers, then a group for each layer.

    Raises:
        CommandError: the source is quantized already, misses a tensor or has one of a wrong shape,
            or the recipe does not fit its shapes.
    """
    refuse_unfit(source)
    layers = recipe.quantized(linears(source.config))
    copies = by_one_name(source.shapes)
    quantized = {layer.source for layer in layers}
    numbers = sorted({layer_number(name) for name in copies} - {None})  # type: ignore[type-var]
    groups = []
    for number in [None, *numbers]:
        kept = {
            name: stored[0]
            for name, stored in copies.items()
            if layer_number(name) == number and name not in quantized
        }
        inside = tuple(layer for layer in layers if layer_number(layer.module) == number)
        label = "all but the layers" if number is None else f"layer {number}"
        groups.append(Group(label, kept, inside))
    return groups


def refuse_unfit(source: Checkpoint) -> None:
    """Refuse a source that is quantized already or not whole.

    Raises:
        CommandError: it is; names the tensors.
    """
    if "quantization_config" in source.config:
        raise CommandError(
            f"{source.path} is quantized already (its config.json has a quantization_config). Give "
            "the checkpoint that it was made from."
        )
    copies = by_one_name(source.shapes)
    expected = text_shapes(source.config)
    missing = [name for name in expected if name not in copies]
    if missing:
        raise CommandError(
            f"{source.path} misses {few(missing)}. Download or save it again: it is not whole."
        )
    for name, stored in copies.items():
        for copy in stored:
            shape = source.shapes[copy]
            if name in expected and shape != expected[name]:
                raise CommandError(
                    f"{source.path}: {copy} has shape {list(shape)}; config.json makes it "
                    f"{list(expected[name])}."
                )
            if not source.dtypes[copy].is_floating_point or source.dtypes[copy].itemsize < 2:
                raise CommandError(
                    f"{source.path}: {copy} is {source.dtypes[copy]}; to quantize, weights have to "
                    "be bfloat16, float16 or float32."
                )


def quantize_group(
    source: Checkpoint,
    group: Group,
    scheme: Scheme,
    quantize: QuantizeFused,
    input_scales: Mapping[str, torch.Tensor],
) -> Tensors:
    """The tensors of a group's file.

    Args:
        input_scales: what ``calibrate`` found, by module; empty without calibration.

    Raises:
        CommandError: the two copies of a weight differ, a weight is not finite, or a scale came out
            wrong; names the tensor.
    """
    copies = by_one_name(source.shapes)
    sources = {layer.source for layer in group.layers}
    for name in [*group.kept, *sources]:
        _refuse_differing(source, copies[name])
    tensors = {name: source.read(stored) for name, stored in group.kept.items()}
    for layers in group.fused():
        weights = {
            layer.module: read_linear(source, copies[layer.source][0], layer) for layer in layers
        }
        for module, weight in weights.items():
            if not bool(weight.isfinite().all()):
                raise CommandError(f"{source.path}: {module} holds a weight that is not finite.")
        scale = input_scales.get(layers[0].module)
        for module, parts in quantize(weights, scale).items():
            _refuse_problems(module, parts, scheme)
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return tensors


def read_linear(source: Checkpoint, stored: str, layer: Linear) -> torch.Tensor:
    """The weight of a layer, ``[out, in]``, from the tensor that an unquantized checkpoint has."""
    if layer.expert is None:
        return source.read(stored)
    rows = (layer.first_row, layer.first_row + layer.shape[0])
    return source.read_part(stored, layer.expert, rows)


def _refuse_differing(source: Checkpoint, stored: list[str]) -> None:
    """Refuse copies that differ: which of them was trained, nobody knows."""
    first, *others = stored
    for other in others:
        if not torch.equal(source.read(first), source.read(other)):
            raise CommandError(
                f"{source.path}: {first} and {other} are one weight of the model and differ. Save "
                "it with tied weights, or drop the copy that is not meant."
            )


def _refuse_problems(module: str, parts: Tensors, scheme: Scheme) -> None:
    shapes = {suffix: tuple(part.shape) for suffix, part in parts.items()}
    found = layer_problems(module, shapes, scheme)
    for suffix, part in parts.items():
        name = f"{module}.{suffix}"
        if is_scale(name):
            found += [text for text in (scale_problem(name, part),) if text]
            found += [text for text in (implausible_scale(name, part),) if text and not found]
    if found:
        raise CommandError(
            f"{'; '.join(found)}. Nothing of this layer was written: its weights are all zero or "
            "not finite, or calibration has never run it."
        )


def file_bytes(source: Checkpoint, group: Group, scheme: Scheme) -> int:
    """What a group's file will take, but for its header (and for scales: at most)."""
    kept = sum(source.num_bytes(stored) for stored in group.kept.values())
    for layer in group.layers:
        for suffix, shape in scheme.shapes(*layer.shape).items():
            dtype = torch.float32 if suffix.endswith("scale") and shape[-1] == 1 else torch.int8
            kept += byte_size(shape, dtype)
    return kept


def working_bytes(source: Checkpoint, group: Group, scheme: Scheme) -> int:
    """What quantizing a group takes at its peak, nearly.

    Its file, its tensors in the source (mapped: the system may drop them), and what the largest of
    its layers, up to three of which are fused, takes in fp32 a few times over.
    """
    largest = max((layer.shape[0] * layer.shape[1] for layer in group.layers), default=0)
    read = {layer.source for layer in group.layers} | set(group.kept.values())
    mapped = sum(source.num_bytes(name) for name in read if name in source.shapes)
    return file_bytes(source, group, scheme) + mapped + 12 * largest * torch.float32.itemsize
