"""Compares a quantized checkpoint with its own config.json, and with the original if there is one.

Tensors are read one layer at a time. Weights are dequantized by ``quant.formats``, which shares no
code with what wrote the checkpoint, so an error of the writer is seen here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from dllm.models.gemma.weights import merge_shared_copies
from dllm.quant.checks import implausible_scale, is_scale, layer_problems, scale_problem
from dllm.quant.formats import Numbers, dequantize_weight
from dllm.quant.schemes import Plan, Scheme, parse_plan
from dllm.quantize.checkpoint import Checkpoint, few
from dllm.quantize.groups import read_linear, refuse_unfit
from dllm.quantize.job import COMPANIONS, TOKENIZERS
from dllm.quantize.linears import Linear, by_one_name, linears, text_shapes
from dllm.settings.command import CommandError

# Relative L2 error of normally distributed weights, measured: FP8 2.4-2.6%, NVFP4 9.3-9.8%.
EXPECTED_ERROR: dict[Numbers, float] = {"fp8": 0.026, "int8": 0.01, "nvfp4": 0.098}
# An error above OUTLIER times that is listed. One above WRONG times that cannot come from rounding:
# these are other weights, or scales that do not belong to them.
OUTLIER, WRONG = 1.25, 3.0
LAYER_SCALAR = ".layer_scalar"


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: what makes the checkpoint wrong; with one of these it fails the check.
        notes: what is unusual but harmless.
        schemes: name of a scheme -> number of layers that have it.
        errors: module -> relative L2 error of its weight against the original's.
        outliers: those of the errors that are larger than the format explains.
        num_bytes, original_bytes: of all tensors of the checkpoint, and of the original.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schemes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    outliers: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    original_bytes: int | None = None


@dataclass(frozen=True)
class _Layer:
    """A quantized layer: which one, its scheme, and the names of its tensors by their last part."""

    linear: Linear
    scheme: Scheme
    stored: dict[str, str]


def verify(
    checkpoint: Checkpoint, original: Checkpoint | None, on_layer: Callable[[], None]
) -> Report:
    """Check everything about a checkpoint that can be checked without running it.

    Args:
        original: the checkpoint that it was made from; None: weights are not compared.
        on_layer: called after each quantized layer.

    Raises:
        CommandError: the checkpoint is not quantized, or with an unknown scheme; or the original
            is quantized, or its tensors do not have the shapes that follow from its config.json.
    """
    plan = _plan(checkpoint)
    originals = {}
    if original is not None:
        refuse_unfit(original)
        originals = by_one_name(original)
    report = Report(num_bytes=_total(checkpoint))
    # A weight that encoder and decoder share may be stored under two names: name -> names stored.
    copies = by_one_name(checkpoint)
    for stored in copies.values():
        if len(stored) > 1:
            report.problems.append(f"{' and '.join(stored)} are two copies of one weight")
    layers = _quantized_layers(checkpoint, plan, copies)
    _check_completeness(report, checkpoint, layers, copies)
    _check_companions(report, checkpoint, original)
    for layer in layers:
        report.schemes[layer.scheme.name] = report.schemes.get(layer.scheme.name, 0) + 1
        if _check_layer(report, checkpoint, layer) and original is not None:
            source = originals[layer.linear.source][0]
            _compare_layer(report, checkpoint, layer, read_linear(original, source, layer.linear))
        on_layer()
    _check_fused(report, checkpoint, layers)
    if original is not None:
        report.original_bytes = _total(original)
        _compare_kept(report, checkpoint, original, {layer.linear.source for layer in layers})
    checkpoint.release()
    return report


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
    return sum(checkpoint.num_bytes(name) for name in checkpoint.shapes)


def _quantized_layers(
    checkpoint: Checkpoint, plan: Plan, copies: dict[str, list[str]]
) -> list[_Layer]:
    """The layers that config.json says are quantized, with the tensors found of each."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for name, stored in copies.items():
        module, _, suffix = name.rpartition(".")
        parts[module][suffix] = stored[0]
    found = []
    for linear in linears(checkpoint.config):
        scheme = plan.scheme_of(linear.module)
        if scheme is not None:
            found.append(_Layer(linear, scheme, parts[linear.module]))
    return found


def _check_completeness(
    report: Report, checkpoint: Checkpoint, layers: list[_Layer], copies: dict[str, list[str]]
) -> None:
    """Check names and shapes of tensors that are not quantized; note those that nothing needs."""
    replaced = {layer.linear.source for layer in layers}
    expected = text_shapes(checkpoint.config)
    known = {
        f"{layer.linear.module}.{suffix}" for layer in layers for suffix in layer.scheme.suffixes
    }
    known.add("lm_head.weight")  # a tied head may be there as a copy of the embedding
    for name, shape in expected.items():
        if name in replaced:
            continue
        known.add(name)
        if name not in copies:
            report.problems.append(f"{name} is missing")
        elif checkpoint.shapes[copies[name][0]] != shape:
            given = list(checkpoint.shapes[copies[name][0]])
            report.problems.append(f"{name} has shape {given}; expected {list(shape)}")
    unknown = [
        name
        for name in copies.keys() - known
        if not name.endswith(LAYER_SCALAR)
        and not name.startswith(("model.encoder.vision_tower.", "model.encoder.embed_vision."))
    ]
    if unknown:
        report.notes.append(f"{len(unknown)} unknown tensors: {few(sorted(unknown))}")


def _check_companions(report: Report, checkpoint: Checkpoint, original: Checkpoint | None) -> None:
    """Check that the files beside the weights are there."""
    if not any((checkpoint.path / name).is_file() for name in TOKENIZERS):
        report.problems.append(f"there is no {' or '.join(TOKENIZERS)}")
    if original is None:
        return
    for name in COMPANIONS:
        if (original.path / name).is_file() and not (checkpoint.path / name).is_file():
            report.problems.append(f"{name} is missing; the original has it")


def _check_layer(report: Report, checkpoint: Checkpoint, layer: _Layer) -> bool:
    """Check tensors, shapes and scales of a layer; returns whether nothing is wrong with them."""
    shapes = {suffix: checkpoint.shapes[name] for suffix, name in layer.stored.items()}
    found = layer_problems(layer.linear.module, shapes, layer.scheme)
    if not found:
        codes = layer.scheme.weight_suffix
        expected = layer.scheme.shapes(*layer.linear.shape)[codes]
        if shapes[codes] != expected:
            found.append(
                f"{layer.stored[codes]} has shape {list(shapes[codes])}; config.json makes it "
                f"{list(expected)}"
            )
    for name in layer.stored.values():
        if is_scale(name):
            scales = checkpoint.read(name)
            text = scale_problem(name, scales) or implausible_scale(name, scales)
            found += [text] if text else []
    report.problems += found
    return not found


def _check_fused(report: Report, checkpoint: Checkpoint, layers: Iterable[_Layer]) -> None:
    """Check that layers which vLLM fuses have one NVFP4 global scale: vLLM uses one for all."""
    scales: dict[str, dict[str, float]] = defaultdict(dict)
    for layer in layers:
        for suffix in ("weight_global_scale", "input_global_scale"):
            if suffix in layer.scheme.suffixes and suffix in layer.stored:
                value = float(checkpoint.read(layer.stored[suffix]).float().max())
                scales[f"{layer.linear.fused}.{suffix}"][layer.linear.module] = value
    for name, values in scales.items():
        if len(set(values.values())) > 1:
            report.problems.append(
                f"{name}: {', '.join(values)} have different scales, and vLLM takes one for all"
            )


def _compare_layer(
    report: Report, checkpoint: Checkpoint, layer: _Layer, weight: torch.Tensor
) -> None:
    """Compute the relative L2 error of a layer's weight against the original's, ``[out, in]``."""
    module = layer.linear.module
    weight = weight.float()
    parts = {suffix: checkpoint.read(name) for suffix, name in layer.stored.items()}
    difference = dequantize_weight(parts, layer.scheme.weights) - weight
    norm = float(torch.linalg.vector_norm(weight))
    error = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
    report.errors[module] = error
    expected = EXPECTED_ERROR[layer.scheme.weights]
    if not error <= WRONG * expected:  # NaN as well
        report.problems.append(
            f"{module} is {error:.1%} away from the original; rounding explains about "
            f"{expected:.1%}. It was made from other weights, or its scales are wrong"
        )
    elif error > OUTLIER * expected:
        report.outliers[module] = error


def _layer_scalars(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The layer scalars as the server loads them: [layers] for the encoder and for the decoder.

    Compared in this form, because a checkpoint may store them for one half only.
    """
    text = checkpoint.config.get("text_config")
    if text is None:  # another family, which has none
        return {}
    scalars = ((n, checkpoint.read(n)) for n in checkpoint.shapes if n.endswith(LAYER_SCALAR))
    return dict(merge_shared_copies(scalars, text["num_hidden_layers"]))  # type: ignore[index]


def _compare_kept(
    report: Report, checkpoint: Checkpoint, original: Checkpoint, quantized: set[str]
) -> None:
    """Check that tensors which were not quantized equal the original's, bit for bit."""
    here, there = by_one_name(checkpoint), by_one_name(original)
    ours = _layer_scalars(checkpoint)
    for name, theirs in _layer_scalars(original).items():
        if not torch.equal(ours[name], theirs):
            report.problems.append(f"{name} (layers.*.layer_scalar) are not the original's")
    for names in (here, there):  # layer scalars are compared already
        for name in [name for name in names if name.endswith(LAYER_SCALAR)]:
            del names[name]
    missing = [name for name in there if name not in here and name not in quantized]
    if missing:
        report.problems.append(f"the original has {few(missing)}, and this has not")
    differing = [
        name
        for name in sorted(here.keys() & there.keys() - quantized)
        if not torch.equal(checkpoint.read(here[name][0]), original.read(there[name][0]))
    ]
    if differing:
        report.problems.append(f"{few(differing)}: not quantized, and not what the original has")
    original.release()
