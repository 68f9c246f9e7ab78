"""Checks of a quantized layer's tensors: each answers with sentences that name what is wrong.

``dllm quantize`` runs them on what it has written, ``dllm check-quant`` on any checkpoint, and a
server while it loads one (``checked``): one that would compute NaN is refused. None or an empty
list means that nothing is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from dllm.quant.schemes import Plan, Scheme

# How the names of tensors with scales end. The last four are not written here: they belong to
# schemes that vLLM serves on CUDA alone (Model Optimizer's NVFP4, static scales of inputs, a
# calibrated KV cache).
SCALE_SUFFIXES = (
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    "weight_scale_2",
    "input_scale",
    "k_scale",
    "v_scale",
)
# Training does not produce weights whose scale (or the inverse of a global scale, which is a
# divisor) is outside this range. Group scales are E4M3 numbers: any of them is plausible.
SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE = 1e-9, 1e9


def is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in SCALE_SUFFIXES


def scale_problem(name: str, scales: torch.Tensor) -> str | None:
    """What is wrong with scales that are not finite or not positive; None if all are.

    A layer with such a scale computes NaN or zeros. Group scales are E4M3 numbers, and that of a
    group of tiny weights may be rounded to 0; something is wrong only if all of a layer are.
    """
    values = scales.float()  # torch neither compares E4M3 tensors nor finds NaN in them
    is_zero = values == 0
    if scales.dtype == torch.float8_e4m3fn and not is_zero.all():
        is_zero = torch.zeros_like(is_zero)
    for kind, is_bad in (
        ("NaN", values.isnan()),
        ("infinite", values.isinf()),
        ("zero", is_zero),
        ("negative", values < 0),
    ):
        count = int(is_bad.sum())
        if count:
            return f"{name}: {count} of {values.numel()} scales are {kind}"
    return None


def implausible_scale(name: str, scales: torch.Tensor) -> str | None:
    """What is wrong with scales that are finite and positive, but that no trained model has.

    compressed-tensors writes a global scale of exactly 1, without a warning, for a layer that
    calibration never ran or whose inputs were NaN or zero.
    """
    values = scales.float()
    if name.endswith("_global_scale"):
        if bool((values == 1.0).any()):
            return f"{name} is 1, which stands for a layer that calibration has never seen"
        values = 1.0 / values
    elif scales.dtype == torch.float8_e4m3fn:
        return None
    low, high = float(values.min()), float(values.max())
    if low < SMALLEST_MAGNITUDE or high > LARGEST_MAGNITUDE:
        return (
            f"{name}: scales from {low:.3g} to {high:.3g}; "
            f"plausible: {SMALLEST_MAGNITUDE:g} to {LARGEST_MAGNITUDE:g}"
        )
    return None


def layer_problems(module: str, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> list[str]:
    """``shapes``: of each of its tensors, by the last part of the tensor's name."""
    missing = [suffix for suffix in scheme.suffixes if suffix not in shapes]
    if missing:
        problem = f"{module} is {scheme.name} and misses {', '.join(missing)}"
        if scheme.weight_suffix != "weight" and "weight" in shapes:
            problem += " (it has an unquantized weight instead)"
        return [problem]
    codes = shapes[scheme.weight_suffix]
    if len(codes) != 2:
        return [f"{module}.{scheme.weight_suffix} has shape {list(codes)}; expected two dimensions"]
    in_features = codes[1] * 2 if scheme.weights == "nvfp4" else codes[1]
    expected = scheme.shapes(codes[0], in_features)
    return [
        f"{module}.{suffix} has shape {list(shapes[suffix])}; expected {list(shape)}, beside "
        f"{scheme.weight_suffix} {list(codes)}"
        for suffix, shape in expected.items()
        if not _same_shape(shapes[suffix], shape)
    ]


def _same_shape(given: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """A single scale may be written as [] or as [1]."""
    return tuple(given) == expected or (expected == (1,) and tuple(given) == ())


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], plan: Plan | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a checkpoint's tensors on; those of a quantized layer when all have come.

    Without a plan only the values of scales are checked. Raises ValueError naming every tensor of a
    layer whose scales are not finite and positive, whose tensors are incomplete or contradict each
    other, or that should not be quantized.
    """
    waiting: dict[str, tuple[Scheme, dict[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        module, _, suffix = name.rpartition(".")
        if is_scale(name):
            _refuse([scale_problem(name, tensor)])
        scheme = plan.scheme_of(module) if plan is not None else None
        is_plain = scheme is None and plan is not None and suffix == "weight"
        if is_plain and tensor.dtype == torch.uint8:
            _refuse([f"{name} holds packed codes, and this layer is served unquantized"])
        if scheme is None or suffix not in scheme.suffixes:
            yield name, tensor
            continue
        _, parts = waiting.setdefault(module, (scheme, {}))
        parts[suffix] = tensor
        if len(parts) == len(scheme.suffixes):
            _refuse(_problems(module, scheme, parts))
            del waiting[module]
            yield from ((f"{module}.{part}", tensor) for part, tensor in parts.items())
    _refuse(
        problem
        for module, (scheme, parts) in waiting.items()
        for problem in _problems(module, scheme, parts)
    )


def _problems(module: str, scheme: Scheme, parts: dict[str, torch.Tensor]) -> list[str]:
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in parts.items()}
    return layer_problems(module, shapes, scheme)


def _refuse(problems: Iterable[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ValueError(
            f"the quantized checkpoint cannot be served: {'; '.join(found)}. Quantize or download "
            "it again; `dllm check-quant` gives a full report."
        )
