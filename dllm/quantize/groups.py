"""Cuts a checkpoint into groups, so that only one at a time is in memory, and quantizes a group.

Each decoder layer is a group, and everything outside the layers is one more. Each becomes a file.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from dllm.quant.checks import implausible_scale, is_scale, layer_problems, scale_problem
from dllm.quant.schemes import Scheme
from dllm.quantize.checkpoint import Checkpoint, few
from dllm.quantize.linears import Linear, by_one_name, layer_number, linears, text_shapes
from dllm.quantize.recipes import quantized_layers
from dllm.settings.command import CommandError

Tensors = dict[str, torch.Tensor]
# Quantizes layers that vLLM fuses into one. Arguments: their weights by module, and the static
# scale of their inputs (the same for all; None if the scheme has none). Result: for each module
# the tensors that a checkpoint holds, by the last part of their names.
QuantizeFused = Callable[[Tensors, torch.Tensor | None], dict[str, Tensors]]


@dataclass(frozen=True)
class Group:
    """The tensors that become one file."""

    label: str  # its name in lines of progress
    kept: Mapping[str, str]  # tensors that are copied: new name -> name in the source
    layers: tuple[Linear, ...]

    def fused(self) -> list[list[Linear]]:
        """The layers in lists; each list holds the layers that vLLM fuses into one."""
        sets: dict[str, list[Linear]] = defaultdict(list)
        for layer in self.layers:
            sets[layer.fused].append(layer)
        return list(sets.values())


def groups_of(source: Checkpoint, scheme: Scheme, ignored: Iterable[str] = ()) -> list[Group]:
    """All but the layers, then each layer. Raises as ``refuse_unfit`` and ``quantized_layers``."""
    refuse_unfit(source)
    layers = quantized_layers(linears(source.config), scheme, ignored)
    copies = by_one_name(source)
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
    """Raises CommandError if it is quantized, or tensors are missing, of wrong shape or dtype."""
    if "quantization_config" in source.config:
        raise CommandError(
            f"{source.path} is quantized already (its config.json has a quantization_config). Give "
            "the checkpoint that it was made from."
        )
    copies = by_one_name(source)
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
    """The tensors of its file, by name. ``input_scales``: by module; empty without calibration.

    Raises CommandError: the encoder's and the decoder's copy of a weight differ, a weight is not
    finite, or a scale is wrong.
    """
    copies = by_one_name(source)
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
    """``[out, in]``. Of experts, whose weights are in one tensor, a part is read."""
    if layer.expert is None:
        return source.read(stored)
    rows = (layer.first_row, layer.first_row + layer.shape[0])
    return source.read_part(stored, layer.expert, rows)


def _refuse_differing(source: Checkpoint, stored: list[str]) -> None:
    """Refuse two copies of one weight that differ: nothing says which of them is right."""
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
        if is_scale(name) and (text := scale_problem(name, part) or implausible_scale(name, part)):
            found.append(text)
    if found:
        raise CommandError(
            f"{'; '.join(found)}. Nothing of this layer was written: its weights are all zero or "
            "not finite, or calibration has never run it."
        )
