"""An FP8 KV cache on a CPU, rounded to the nearest number as on a GPU.

When vLLM's CPU kernel writes keys and values to an FP8 cache it truncates them: an error of 5%,
where rounding to nearest has 2.6%. Here they are rounded first, so that truncating changes nothing.
"""

import torch
from vllm.model_executor.layers.attention import Attention

from dllm.attention.inputs import FP8_OF

# Rounded values are raised by this factor. The kernel divides them by the scale, and if that gave a
# little less than the FP8 number, truncating would give the number below. 2^-6 of the value is more
# than that error, and less than half the distance to the next number, which is 2^-4 or more (E4M3
# has 3 mantissa bits).
ABOVE = 1 + 2.0**-6


def write_rounded(layer: Attention) -> None:
    """Make this layer round the keys and values that it writes to an FP8 cache on a CPU.

    Does nothing where the cache is not FP8 or another backend than vLLM's CPU_ATTN writes it. Other
    layers and models in the process are not touched.
    """
    impl = layer.impl
    if layer.attn_backend.get_name() != "CPU_ATTN" or not impl.is_fp8_kv_cache:
        return
    dtype, write = FP8_OF[impl.kv_cache_dtype], impl.do_kv_cache_update

    def do_kv_cache_update(
        layer: Attention,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        key = nearest(key, dtype, layer._k_scale_float)
        value = nearest(value, dtype, layer._v_scale_float)
        write(layer, key, value, kv_cache, slot_mapping)

    impl.do_kv_cache_update = do_kv_cache_update


def nearest(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values that become the nearest FP8 numbers when they are divided by ``scale`` and truncated.

    values: any shape and floating dtype, which the result has too. dtype: of the cache.
    """
    largest = torch.finfo(dtype).max
    rounded = (values.float() / scale).clamp(-largest, largest).to(dtype).float()
    return (rounded * ABOVE * scale).to(values.dtype)
