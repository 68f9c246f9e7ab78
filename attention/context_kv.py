"""Keys and values of a drafter's context, of all its layers, computed and stored by one kernel.

`reference.context_kv` says what is computed. Separate operations write and read the product of all
layers three times, and launch a kernel for each layer; here the product of one head stays in
registers until it is stored. Sums, norm and rotation are fp32, rounded once to the cache's dtype.

A program computes one head of one layer, keys or values, for a tile of tokens. RoPE turns pairs of
dimensions, so it makes two products, of the first and of the second dimensions of all pairs: the
two sides of a pair then lie in the same thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.attention.inputs import ContextWeights, PagedKV, expect
from dllm.attention.online_softmax import dot
from dllm.attention.tuning import next_power_of_2

FEW_TOKENS = 16  # up to so many tokens make one narrow tile
STAGE_BYTES = 96 * 1024  # shared memory for loading ahead; the smallest cards have 99 KiB
TILE_GROUP = 16  # token tiles whose hidden states stay in the L2 cache while heads go by


@dataclass(frozen=True)
class ContextTiles:
    """Tokens and hidden columns of a tile, and Triton's launch options."""

    tokens: int
    hidden: int
    num_warps: int
    num_stages: int


def context_tiles(num_tokens: int, head_size: int, element_size: int) -> ContextTiles:
    """Few tokens only read the weight, many tokens compute. fp32 has no matrix instruction and gets
    a tile that fits into registers.
    """
    columns = 2 * _pairs(head_size)
    if element_size == 4:
        return ContextTiles(tokens=16, hidden=32, num_warps=4, num_stages=2)
    tokens = FEW_TOKENS if num_tokens <= FEW_TOKENS else 128 if columns <= 128 else 64
    ahead = STAGE_BYTES // ((tokens + columns) * 64 * element_size)
    return ContextTiles(tokens, 64, 4 if tokens == FEW_TOKENS else 8, min(ahead, 5))


def _pairs(head_size: int) -> int:
    """Padded to a size that a product can have."""
    return max(16, next_power_of_2(head_size // 2))


@triton.jit
def _chosen(values, index, COUNT: tl.constexpr):
    """values[index] for an index of run time, which Triton does not allow in a tuple."""
    value = values[0]
    for other in tl.static_range(1, COUNT):
        value = tl.where(index == other, values[other], value)
    return value


# Slots and positions are slices that start anywhere, and every step has another number of tokens:
# none of that may compile the kernel again.
@triton.jit(
    do_not_specialize=["num_tokens", "slots_stride"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def context_kv_kernel(
    hidden, weight, bias, k_norm, cos_sin, positions, caches, scales, slots,
    num_tokens, eps,
    hidden_stride, weight_stride, cos_sin_stride, slots_stride,
    page_stride, slot_stride, head_stride, SLOTS_OF: tl.constexpr,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, ROTARY_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr, FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One head for one tile of tokens. Grid: token tiles * layers * 2 * KV heads.

    ``caches`` and ``scales`` hold those of the keys and of the values of each layer in turn. The
    slots of layer l are row SLOTS_OF[l] of ``slots``.
    """
    # Programs that run at once share their token tiles and few heads.
    NUM_HEADS: tl.constexpr = NUM_LAYERS * 2 * NUM_KV_HEADS
    row, col = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    tile, head = tl.swizzle2d(row, col, tl.cdiv(num_tokens, BLOCK_M), NUM_HEADS, GROUP)
    half = head // NUM_KV_HEADS  # the keys of layer 0, its values, the keys of layer 1, ...
    layer = half // 2

    first_token = tile * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    slots += _chosen(SLOTS_OF, layer, NUM_LAYERS).to(tl.int64) * slots_stride
    slot = tl.load(slots + token, token < num_tokens, other=-1).to(tl.int64)
    is_stored = slot >= 0

    # The two dimensions of each pair. Interleaved RoPE turns neighbours; neox RoPE turns dimension
    # p with p + ROTARY_SIZE / 2. What is not turned makes pairs that only share a thread.
    pair = tl.arange(0, PAIRS)
    is_pair = pair < HEAD_SIZE // 2
    is_turned = pair < ROTARY_SIZE // 2
    if INTERLEAVED:
        dim_1 = 2 * pair
        dim_2 = dim_1 + 1
    else:
        dim_1 = tl.where(is_turned, pair, pair + ROTARY_SIZE // 2)
        dim_2 = dim_1 + tl.where(is_turned, ROTARY_SIZE // 2, (HEAD_SIZE - ROTARY_SIZE) // 2)

    # [tokens, pairs] each: the two sides.
    in_block = tl.arange(0, BLOCK_K)
    in_tile = tl.minimum(token, num_tokens - 1) - first_token  # behind the end: not stored
    hidden += first_token.to(tl.int64) * hidden_stride
    weight += head.to(tl.int64) * HEAD_SIZE * weight_stride
    hidden_at = hidden + in_tile[:, None] * hidden_stride + in_block[None, :]
    weight_1 = weight + dim_1[None, :] * weight_stride + in_block[:, None]
    weight_2 = weight + dim_2[None, :] * weight_stride + in_block[:, None]
    first = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    second = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    for start in range(0, HIDDEN_SIZE, BLOCK_K):
        is_hidden = start + in_block < HIDDEN_SIZE
        is_weight = is_hidden[:, None] & is_pair[None, :]
        x = tl.load(hidden_at + start, is_hidden[None, :], other=0.0)
        first = dot(x, tl.load(weight_1 + start, is_weight, other=0.0), first, UPCAST)
        second = dot(x, tl.load(weight_2 + start, is_weight, other=0.0), second, UPCAST)
    if HAS_BIAS:
        bias += head * HEAD_SIZE
        first += tl.load(bias + dim_1, is_pair, other=0.0).to(tl.float32)[None, :]
        second += tl.load(bias + dim_2, is_pair, other=0.0).to(tl.float32)[None, :]

    if half % 2 == 0:  # keys
        k_norm += layer * HEAD_SIZE
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        first *= scale * tl.load(k_norm + dim_1, is_pair, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(k_norm + dim_2, is_pair, other=0.0).to(tl.float32)[None, :]
        # A token without a slot may have any position.
        position = tl.load(positions + token, is_stored, other=0).to(tl.int64)
        angle_at = cos_sin + position[:, None] * cos_sin_stride + pair[None, :]
        has_angle = is_stored[:, None] & is_turned[None, :]
        cos = tl.load(angle_at, has_angle, other=1.0).to(tl.float32)
        sin = tl.load(angle_at + ROTARY_SIZE // 2, has_angle, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned

    if FP8_MAX > 0:  # as `cache_write`
        if HAS_SCALES:
            unit = tl.load(_chosen(scales, half, 2 * NUM_LAYERS))
            first /= unit
            second /= unit
        first = tl.clamp(first, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    cache = _chosen(caches, half, 2 * NUM_LAYERS)
    in_cache = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    head_at = cache + (in_cache + head % NUM_KV_HEADS * head_stride)[:, None]
    is_written = is_stored[:, None] & is_pair[None, :]
    tl.store(head_at + dim_1[None, :], first.to(cache.dtype.element_ty), is_written)
    tl.store(head_at + dim_2[None, :], second.to(cache.dtype.element_ty), is_written)


# False where Triton interprets kernels on a CPU.
_IS_COMPILED = isinstance(context_kv_kernel, triton.JITFunction)


def have_one_layout(caches: Sequence[PagedKV]) -> bool:
    """Whether the kernel can write these caches together."""
    tensors = [tensor for cache in caches for tensor in (cache.key, cache.value)]
    return len({(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}) == 1


def write_context_kv(
    hidden: Tensor,
    positions: Tensor,
    weights: ContextWeights,
    caches: Sequence[PagedKV],
    slots: Sequence[Tensor],
    tiles: ContextTiles | None = None,
) -> None:
    """Never waits for the device, and a CUDA graph can capture it. Two tokens of one call must not
    share a slot of a layer.

    Args:
        hidden: ``[tokens, hidden]``, normalized, in the weight's dtype.
        positions: ``[tokens]`` int64 or int32; those of tokens without a slot are not read.
        caches: of each layer, in the weight's dtype or fp8, all of the same shape and strides.
        slots: of each layer ``[tokens]`` int64 or int32, page * page_size + slot in the page; a
            negative slot is not written.

    Raises:
        ValueError: tensors that do not fit together, with both values.
    """
    _check(hidden, positions, weights, caches, slots)
    num_tokens, hidden_size = hidden.shape
    if num_tokens == 0:
        return
    first, weight, cos_sin = caches[0], weights.weight, weights.cos_sin
    _, page_size, num_kv_heads, head_size = first.key.shape
    tiles = tiles or context_tiles(num_tokens, head_size, hidden.element_size())
    scales = [scale for cache in caches for scale in (cache.k_scale, cache.v_scale)]
    # All layers of a group of vLLM's KV cache are given the same tensor.
    rows = list({each.data_ptr(): each for each in slots}.values())
    starts = [each.data_ptr() for each in rows]
    joined = slots[0][None] if len(rows) == 1 else torch.stack(rows)
    context_kv_kernel[(triton.cdiv(num_tokens, tiles.tokens) * len(caches) * 2 * num_kv_heads,)](
        hidden, weight, weights.bias, weights.k_norm, cos_sin, positions,
        tuple(tensor for cache in caches for tensor in (cache.key, cache.value)),
        None if scales[0] is None else tuple(scales), joined,
        num_tokens, weights.eps,
        hidden.stride(0), weight.stride(0), cos_sin.stride(0), joined.stride(0),
        *first.key.stride()[:3], SLOTS_OF=tuple(starts.index(each.data_ptr()) for each in slots),
        NUM_LAYERS=len(caches), NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size,
        PAIRS=_pairs(head_size), ROTARY_SIZE=cos_sin.shape[1], INTERLEAVED=not weights.is_neox,
        HIDDEN_SIZE=hidden_size, PAGE_SIZE=page_size, HAS_BIAS=weights.bias is not None,
        HAS_SCALES=scales[0] is not None,
        FP8_MAX=torch.finfo(first.key.dtype).max if first.is_fp8 else 0.0,
        BLOCK_M=tiles.tokens, BLOCK_K=tiles.hidden, GROUP=TILE_GROUP,
        UPCAST=hidden.dtype == torch.bfloat16 and not _IS_COMPILED,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _check(
    hidden: Tensor,
    positions: Tensor,
    weights: ContextWeights,
    caches: Sequence[PagedKV],
    slots: Sequence[Tensor],
) -> None:
    num_tokens, (_, _, num_kv_heads, head_size) = len(positions), caches[0].key.shape
    rows, rotary_size = len(caches) * 2 * num_kv_heads * head_size, weights.cos_sin.shape[1]
    expect("hidden", hidden, (num_tokens, weights.weight.shape[1]), [weights.weight.dtype])
    expect("weight", weights.weight, (rows, None), caches[0].dtypes)
    expect("k_norm", weights.k_norm, (len(caches), head_size), [hidden.dtype])
    if weights.bias is not None:
        expect("bias", weights.bias, (rows,), [hidden.dtype])
    for layer, each in enumerate(slots):
        expect(f"slots of layer {layer}", each, (num_tokens,), [torch.int32, torch.int64])
    if len(slots) != len(caches):
        raise ValueError(f"slots of {len(slots)} layers for the caches of {len(caches)}")
    if head_size % 2 or head_size > ContextWeights.MAX_HEAD_SIZE:
        raise ValueError(
            f"head size is {head_size}, allowed: even, at most {ContextWeights.MAX_HEAD_SIZE}"
        )
    if rotary_size % 2 or rotary_size > head_size:
        raise ValueError(f"cos_sin has {rotary_size} columns, allowed: even, at most {head_size}")
    scales = {scale is None for cache in caches for scale in (cache.k_scale, cache.v_scale)}
    if len(scales) > 1:
        raise ValueError("some caches have scales and others none, expected all or none")
    if not have_one_layout(caches):
        layouts = [(list(c.key.shape), c.key.stride(), c.key.dtype) for c in caches]
        raise ValueError(f"caches are {layouts}, expected one layout")
