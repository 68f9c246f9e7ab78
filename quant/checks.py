"""What may not be wrong with the tensors of a quantized layer, as sentences that name the tensor.

Pure functions on names, shapes and tensors: ``dllm quantize`` asks them of every group of layers
before it writes it, ``dllm check-quant`` of a whole checkpoint, and the server while it loads one.
An empty answer means that nothing was found.
"""

from collections.abc import Mapping

import torch

from quant.schemes import Scheme

# The last three are of schemes that vLLM serves on CUDA alone: static inputs, a calibrated cache.
SCALE_SUFFIXES = (
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "k_scale",
    "v_scale",
)
# A scale of a weight or a divisor beyond these is none that training produces: a weight whose
# largest value is 1e-9 or 1e9. Group scales are E4M3, whose whole range is plausible.
SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE = 1e-9, 1e9


def is_scale(name: str) -> bool:
    """Whether a tensor of this name holds scales."""
    return name.rpartition(".")[2] in SCALE_SUFFIXES


def scale_problem(name: str, scales: torch.Tensor) -> str | None:
    """How many scales are not finite or not positive: with any, a layer computes NaN or zeros."""
    values = scales.float()  # E4M3 can neither be compared nor be asked for NaN
    for kind, is_bad in (
        ("NaN", values.isnan()),
        ("infinite", values.isinf()),
        ("zero", values == 0),
        ("negative", values < 0),
    ):
        count = int(is_bad.sum())
        if count:
            return f"{name}: {count} of {values.numel()} scales are {kind}"
    return None


def implausible_scale(name: str, scales: torch.Tensor) -> str | None:
    """A finite, positive scale that no trained weight and no calibrated input has.

    compressed-tensors writes a global scale of exactly 1 for what calibration has never seen (or
    saw as NaN or zero), and says nothing.
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
    """What is missing of a quantized layer, and which shapes contradict each other.

    Args:
        module: the layer's name in the checkpoint.
        shapes: suffix -> shape of each of its tensors.
        scheme: how the layer is said to be quantized.
    """
    missing = [suffix for suffix in scheme.suffixes if suffix not in shapes]
    if missing:
        kept = (
            ""
            if scheme.weight_suffix == "weight" or "weight" not in shapes
            else (" (it has an unquantized weight instead)")
        )
        return [f"{module} is {scheme.name} and misses {', '.join(missing)}{kept}"]
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
    """One scale may be written as [] or as [1]."""
    return tuple(given) == expected or (expected == (1,) and tuple(given) == ())
