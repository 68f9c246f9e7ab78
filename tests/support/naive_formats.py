"""A reference for the number formats of ``quant``, in numpy and float64. Shares no code with it.

A format is the list of its magnitudes, indexed by their code. A value is encoded by a search for
the nearest magnitude; ties go to the even code.
"""

import numpy as np

Array = np.ndarray


def fp8_value(code: int) -> float:
    """The value of an E4M3 code by definition: bias 7, subnormals, no infinity, one NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = (
        2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    )
    return -magnitude if sign else magnitude


FP8 = np.array([fp8_value(code) for code in range(127)])  # magnitudes, 0 to 448
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INT8 = np.arange(128.0)


def nearest(values: Array, magnitudes: Array) -> Array:
    """Index of the nearest magnitude of each value, ties to the even index."""
    sizes = np.abs(values)
    upper = np.searchsorted(magnitudes, sizes).clip(1, len(magnitudes) - 1)
    below, above = sizes - magnitudes[upper - 1], magnitudes[upper] - sizes
    is_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(is_lower, upper - 1, upper)


def rounded(values: Array, magnitudes: Array) -> Array:
    """Each value rounded to the nearest one of the format."""
    return np.sign(values) * magnitudes[nearest(values, magnitudes)]


def round_trip_tokens(values: Array, magnitudes: Array) -> Array:
    """Quantize and dequantize with one scale for each row of the last axis.

    The scale maps the row's largest magnitude to the format's largest. As in vLLM's FP8 kernels, a
    scale is at least 1 / (448 * 512).
    """
    values = values.astype(np.float64)
    scale = np.abs(values).max(-1, keepdims=True) / magnitudes[-1]
    scale = np.maximum(scale, 1 / (448 * 512) if magnitudes is FP8 else 1e-30)
    return rounded(values / scale, magnitudes) * scale


def nvfp4_scales(values: Array, divisor: float) -> Array:
    """The E4M3 scales of groups of 16 values: [..., n] to [..., n / 16]."""
    groups = values.astype(np.float64).reshape(*values.shape[:-1], -1, 16)
    return rounded(np.abs(groups).max(-1) / 6 * divisor, FP8)


def round_trip_nvfp4(values: Array, divisor: float) -> Array:
    """Quantize and dequantize: FP4, one E4M3 scale for each 16 values, one divisor for all."""
    groups = values.astype(np.float64).reshape(*values.shape[:-1], -1, 16)
    step = nvfp4_scales(values, divisor)[..., None] / divisor
    safe = np.where(step > 0, step, 1.0)
    return np.where(step > 0, rounded(groups / safe, FP4) * step, 0.0).reshape(values.shape)
