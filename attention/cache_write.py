"""Writing K and V into cache pages, with optional fp8 quantization.

    cache[slot // page_size, slot % page_size] = x / scale        for every token with slot >= 0

A token with slot -1 is not written: that leaves out padding and rejected draft tokens. Two tokens
of one call must not share a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.attention.inputs import PagedKV, expect
from dllm.attention.tuning import next_power_of_2


# The slots of a step may be a slice that starts anywhere: that must not compile the kernel again.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
    PAGE_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """One token's K and V for one KV head. Grid: (tokens, KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    page, in_page = slot // PAGE_SIZE, slot % PAGE_SIZE
    dim = tl.arange(0, PADDED_SIZE)  # [head size], padded to a power of two
    is_dim = dim < HEAD_SIZE
    k = tl.load(key + token * key_stride_token + head * key_stride_head + dim, is_dim)
    v = tl.load(value + token * value_stride_token + head * value_stride_head + dim, is_dim)
    if FP8_MAX > 0:  # fp8: clamp, because casting a larger number gives NaN or infinity
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        if HAS_K_SCALE:
            k = k / tl.load(k_scale)
        if HAS_V_SCALE:
            v = v / tl.load(v_scale)
        k = tl.clamp(k, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    k_row = page * k_stride_page + in_page * k_stride_slot + head * k_stride_head
    v_row = page * v_stride_page + in_page * v_stride_slot + head * v_stride_head
    tl.store(key_cache + k_row + dim, k.to(key_cache.dtype.element_ty), is_dim)
    tl.store(value_cache + v_row + dim, v.to(value_cache.dtype.element_ty), is_dim)


def write_kv(key: Tensor, value: Tensor, cache: PagedKV, slot_mapping: Tensor) -> None:
    """key, value ``[>= num_slots, num_kv_heads, head_size]`` fp16, bf16 or fp32; slot_mapping
    ``[num_slots]`` int64 or int32: page * page_size + slot in the page. Tokens beyond num_slots are
    padding. An fp8 cache stores x / scale, rounded to the nearest fp8 number; what is too large
    becomes the largest finite one, NaN stays NaN. Never waits for the device. The arguments must
    fit together: `check_write`.
    """
    num_slots, num_kv_heads = slot_mapping.shape[0], key.shape[1]
    if num_slots == 0:
        return
    write_kv_kernel[(num_slots, num_kv_heads)](
        key, value, cache.key, cache.value, cache.k_scale, cache.v_scale, slot_mapping,
        *key.stride()[:2], *value.stride()[:2],
        *cache.key.stride()[:3], *cache.value.stride()[:3],
        PAGE_SIZE=cache.page_size, HEAD_SIZE=key.shape[2],
        PADDED_SIZE=next_power_of_2(key.shape[2]),
        HAS_K_SCALE=cache.k_scale is not None, HAS_V_SCALE=cache.v_scale is not None,
        FP8_MAX=torch.finfo(cache.key.dtype).max if cache.is_fp8 else 0.0, num_warps=1,
    )  # fmt: skip


def check_write(key: Tensor, value: Tensor, cache: PagedKV, slot_mapping: Tensor) -> None:
    """Raises ValueError, with both values. Reads no data: slots may be beyond the cache."""
    expect("key", key, (None, *cache.key.shape[2:]), cache.dtypes)
    expect("value", value, key.shape, [key.dtype])
    expect("slot_mapping", slot_mapping, (None,), [torch.int32, torch.int64])
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping has {slot_mapping.shape[0]} slots for {key.shape[0]} tokens"
        )
