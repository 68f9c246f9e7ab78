"""An FP8 KV cache on a CPU, rounded to the nearest as on a GPU.

vLLM's CPU kernel truncates keys and values when it writes them: an error of 5% where rounding has
2.6%. Here they are rounded first, so that truncation finds nothing to cut.
"""

import torch
from vllm.model_executor.layers.attention import Attention

from attention.inputs import FP8_DTYPES

# The kernel divides by the scale before it truncates. This much above a value, less than half of
# the least step of a format with three mantissa bits, no rounding of that division is seen.
ABOVE = 1 + 2.0**-6


def write_rounded(layer: Attention) -> None:
    """Round what this layer writes to its cache, if the cache is FP8 and vLLM's CPU kernel writes.

    Of this layer alone: other models in the process are not touched.
    """
    impl = layer.impl
    if layer.attn_backend.get_name() != "CPU_ATTN" or not impl.is_fp8_kv_cache:
        return
    dtype = FP8_DTYPES["e5m2" in impl.kv_cache_dtype]
    write = impl.do_kv_cache_update

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
    """Values that truncation to ``dtype``, after division by ``scale``, makes the nearest ones."""
    largest = torch.finfo(dtype).max
    rounded = (values.float() / scale).clamp(-largest, largest).to(dtype).float()
    return (rounded * ABOVE * scale).to(values.dtype)
