"""An FP8 KV cache on a CPU, rounded to the nearest number as on a GPU.

When vLLM's CPU kernel writes keys and values to an FP8 cache it truncates them: an error of 5%,
where rounding to nearest has 2.6%. `cpu_backend` rounds them first, so that truncating changes
nothing.
"""

import torch

# Rounded values are raised by this factor. The kernel divides them by the scale, and if that gave a
# little less than the FP8 number, truncating would give the number below. 2^-6 of the value is more
# than that error, and less than half the distance to the next number, which is 2^-4 or more (E4M3
# has 3 mantissa bits).
ABOVE = 1 + 2.0**-6


def nearest(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values that give the nearest FP8 numbers when divided by ``scale`` and truncated."""
    largest = torch.finfo(dtype).max
    rounded = (values.float() / scale).clamp(-largest, largest).to(dtype).float()
    return (rounded * ABOVE * scale).to(values.dtype)
