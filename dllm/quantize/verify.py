"""Compares a quantized checkpoint with its own config.json, and with the original if there is one.

Tensors are read one layer at a time. Weights are dequantized by ``quant.formats``, which shares no
code with what wrote the checkpoint, so an error of the writer is seen here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dllm.models.gemma.weights import LayerScalars, merge_shared_copies
from dllm.quant.checks import implausible_scale, is_scale, layer_problems, scale_problem
from dllm.quant.formats import QuantDtype, dequantize_weight
from dllm.quant.schemes import Plan, Scheme, parse_plan
from dllm.quantize.checkpoint import Checkpoint, few
from dllm.quantize.job import COMPANIONS, TOKENIZERS
from dllm.quantize.linears import (
    Linear,
    by_one_name,
    linears,
    part_of,
    refuse_unfit,
    text_shapes,
)
from dllm.settings.command import CommandError

# Relative L2 error of normally distributed weights, measured: FP8 2.4-2.6%, NVFP4 9.3-9.8%.
EXPECTED_ERROR: dict[QuantDtype, float] = {"fp8": 0.026, "int8": 0.01, "nvfp4": 0.098}
# An error above OUTLIER times that is listed. One above WRONG times that cannot come from rounding:
# these are other weights, or scales that do not belong to them.
OUTLIER, WRONG = 1.25, 3.0
LAYER_SCALAR = ".layer_scalar"


@dataclass
class Report:
    problems: list[str] = field(default_factory=list)  # with one of these it fails the check
    notes: list[str] = field(default_factory=list)  # what is unusual but harmless
    schemes: dict[str, int] = field(default_factory=dict)  # name -> number of layers
    # Module -> relative L2 error of its weight against the original's; and those of them that are
    # larger than the format explains.
    errors: dict[str, float] = field(default_factory=dict)
    outliers: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0  # of all tensors
    original_bytes: int | None = None


@dataclass(frozen=True)
class _Layer:
    linear: Linear
    scheme: Scheme
    stored: dict[str, str]


def verify(
    checkpoint: Checkpoint, original: Checkpoint | None, on_layer: Callable[[], None]
) -> Report:
    """Check everything about a checkpoint that can be checked without running it.

    Raises CommandError: the checkpoint is not quantized, or with an unknown scheme; or the original
    is quantized, or its tensors do not have the shapes that follow from its config.json.
    """
    if original is not None:
        refuse_unfit(original)
    checker = _Checker(checkpoint, original)
    checker.run(on_layer)
    return checker.report


class _Checker:
    def __init__(self, checkpoint: Checkpoint, original: Checkpoint | None) -> None:
        self.checkpoint, self.original = checkpoint, original
        self.report = Report(num_bytes=_total(checkpoint))
        self.problems = self.report.problems
        # A weight that encoder and decoder share may be stored under two names: name -> names.
        self.copies = by_one_name(checkpoint)
        self.originals = by_one_name(original) if original is not None else {}
        plan, parts = _plan(checkpoint), defaultdict[str, dict[str, str]](dict)
        for name, stored in self.copies.items():
            module, _, suffix = name.rpartition(".")
            parts[module][suffix] = stored[0]
        self.layers = [
            _Layer(linear, scheme, parts[linear.module])
            for linear in linears(checkpoint.config)
            if (scheme := plan.scheme_of(linear.module)) is not None
        ]

    def run(self, on_layer: Callable[[], None]) -> None:
        for stored in self.copies.values():
            if len(stored) > 1:
                self.problems.append(f"{' and '.join(stored)} are two copies of one weight")
        self.check_completeness()
        self.check_companions()
        for layer in self.layers:
            name = layer.scheme.name
            self.report.schemes[name] = self.report.schemes.get(name, 0) + 1
            is_whole = self.check_layer(layer)
            if is_whole and self.original is not None:
                source = self.original.tensors[self.originals[layer.linear.source][0]]
                self.compare_layer(layer, part_of(source, layer.linear))
            on_layer()
        self.check_fused()
        if self.original is not None:
            self.report.original_bytes = _total(self.original)
            self.compare_kept(self.original)

    def parts_of(self, layer: _Layer) -> dict[str, torch.Tensor]:
        return {suffix: self.checkpoint.tensors[name] for suffix, name in layer.stored.items()}

    def check_completeness(self) -> None:
        replaced = {layer.linear.source for layer in self.layers}
        known = {
            f"{layer.linear.module}.{suffix}"
            for layer in self.layers
            for suffix in layer.scheme.suffixes
        }
        known.add("lm_head.weight")  # a tied head may be there as a copy of the embedding
        for name, shape in text_shapes(self.checkpoint.config).items():
            if name in replaced:
                continue
            known.add(name)
            if name not in self.copies:
                self.problems.append(f"{name} is missing")
            elif (given := self.checkpoint.tensors[self.copies[name][0]].shape) != shape:
                self.problems.append(f"{name} has shape {list(given)}; expected {list(shape)}")
        others = (LAYER_SCALAR, "model.encoder.vision_tower.", "model.encoder.embed_vision.")
        unknown = [
            name
            for name in self.copies.keys() - known
            if not name.endswith(others[0]) and not name.startswith(others[1:])
        ]
        if unknown:
            self.report.notes.append(f"{len(unknown)} unknown tensors: {few(sorted(unknown))}")

    def check_companions(self) -> None:
        path = self.checkpoint.path
        if not any((path / name).is_file() for name in TOKENIZERS):
            self.problems.append(f"there is no {' or '.join(TOKENIZERS)}")
        for name in COMPANIONS if self.original is not None else ():
            if (self.original.path / name).is_file() and not (path / name).is_file():  # type: ignore[union-attr]
                self.problems.append(f"{name} is missing; the original has it")

    def check_layer(self, layer: _Layer) -> bool:
        """Check tensors, shapes and scales of a layer; returns whether all of them are right."""
        parts = self.parts_of(layer)
        shapes = {suffix: tuple(part.shape) for suffix, part in parts.items()}
        found = layer_problems(layer.linear.module, shapes, layer.scheme)
        codes = layer.scheme.weight_suffix
        expected = layer.scheme.shapes(*layer.linear.shape)[codes]
        if not found and shapes[codes] != expected:
            found.append(
                f"{layer.stored[codes]} has shape {list(shapes[codes])}; config.json makes it "
                f"{list(expected)}"
            )
        for name in filter(is_scale, layer.stored.values()):
            scales = self.checkpoint.tensors[name]
            text = scale_problem(name, scales) or implausible_scale(name, scales)
            found += [text] if text else []
        self.problems += found
        return not found

    def check_fused(self) -> None:
        """Check that layers which vLLM fuses have one NVFP4 global scale: vLLM uses one for all."""
        scales: dict[str, dict[str, float]] = defaultdict(dict)
        for layer in self.layers:
            for suffix in ("weight_global_scale", "input_global_scale"):
                if suffix in layer.scheme.suffixes and suffix in layer.stored:
                    value = float(self.checkpoint.tensors[layer.stored[suffix]].float().max())
                    scales[f"{layer.linear.fused}.{suffix}"][layer.linear.module] = value
        for name, values in scales.items():
            if len(set(values.values())) > 1:
                self.problems.append(
                    f"{name}: {', '.join(values)} have different scales, and vLLM takes one for all"
                )

    def compare_layer(self, layer: _Layer, weight: torch.Tensor) -> None:
        module, weight = layer.linear.module, weight.float()
        difference = dequantize_weight(self.parts_of(layer), layer.scheme.weights) - weight
        norm = float(torch.linalg.vector_norm(weight))
        error = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
        self.report.errors[module] = error
        expected = EXPECTED_ERROR[layer.scheme.weights]
        if not error <= WRONG * expected:  # NaN as well
            self.problems.append(
                f"{module} is {error:.1%} away from the original; rounding explains about "
                f"{expected:.1%}. It was made from other weights, or its scales are wrong"
            )
        elif error > OUTLIER * expected:
            self.report.outliers[module] = error

    def compare_kept(self, original: Checkpoint) -> None:
        ours = _layer_scalars(self.checkpoint)
        for name, theirs in _layer_scalars(original).items():
            if not torch.equal(ours[name], theirs):
                self.problems.append(f"{name} (layers.*.layer_scalar) are not the original's")
        quantized = {layer.linear.source for layer in self.layers}
        here, there = (
            {name for name in names if not name.endswith(LAYER_SCALAR)} - quantized
            for names in (self.copies, self.originals)
        )
        if missing := sorted(there - here):
            self.problems.append(f"the original has {few(missing)}, and this has not")
        made, given = self.checkpoint.tensors, original.tensors
        differing = [
            name
            for name in sorted(here & there)
            if not torch.equal(made[self.copies[name][0]], given[self.originals[name][0]])
        ]
        if differing:
            self.problems.append(f"{few(differing)}: not quantized, and not what the original has")


def _plan(checkpoint: Checkpoint) -> Plan:
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict):
        raise CommandError(
            f"{checkpoint.path} is not quantized: its config.json has no quantization_config."
        )
    try:
        return parse_plan(config)
    except ValueError as error:
        raise CommandError(f"{checkpoint.path / 'config.json'}: {error}") from error


def _total(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


def _layer_scalars(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The layer scalars as the server loads them: [layers] for the encoder and for the decoder.

    Compared in this form, because a checkpoint may store them for one half only.
    """
    text = checkpoint.config.get("text_config")
    if text is None:  # another family, which has none
        return {}
    scalars = ((n, each) for n, each in checkpoint.tensors.items() if n.endswith(LAYER_SCALAR))
    return dict(merge_shared_copies(scalars, LayerScalars(text["num_hidden_layers"])))  # type: ignore[index]
