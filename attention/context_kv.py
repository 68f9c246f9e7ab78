"""Keys and values of a drafter's context, of all its layers, computed and stored by one kernel.

For token t, layer l and KV head h, with x_t the normalized hidden state:

    k = RoPE(RMSNorm(W_k[l, h] x_t + b) * k_norm[l], position of t)    -> key cache of layer l
    v = W_v[l, h] x_t + b                                              -> value cache of layer l

both at slot slots[l][t], or nowhere if that is negative. Separate operations would write and read
the product three times, and launch one kernel for each layer. Here the product of one head stays in
registers until it is stored; sums, norm and rotation are fp32, rounded once to the cache's dtype.

A program computes one head for a tile of tokens. RoPE turns pairs of dimensions, so the rows of the
weight are loaded pair by pair, whatever the style: columns 2p and 2p + 1 of the product are the two
dimensions of pair p, and both lie in the same thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.attention.inputs import QUERY_DTYPES, PagedKV, expect
from dllm.attention.tuning import next_power_of_2

MAX_CONTEXT_HEAD_SIZE = 256  # a larger product of one head does not fit into registers
FEW_TOKENS = 16  # up to so many tokens make one narrow tile
STAGE_BYTES = 96 * 1024  # shared memory for loading ahead; the smallest cards have 99 KiB
TILE_GROUP = 16  # token tiles whose hidden states stay in the L2 cache while heads go by


@dataclass(frozen=True)
class ContextTiles:
    """How the product is cut: tokens and hidden columns of a tile, and Triton's launch options."""

    tokens: int
    hidden: int
    num_warps: int
    num_stages: int


def context_tiles(num_tokens: int, head_size: int, element_size: int) -> ContextTiles:
    """Tiles for a head size and the bytes of an element.

    There are two: few tokens only read the weight, many tokens compute. fp32 has no matrix
    instruction and gets a tile that fits into registers.
    """
    columns = max(16, next_power_of_2(head_size))
    if element_size == 4:
        return ContextTiles(tokens=16, hidden=32, num_warps=4, num_stages=2)
    tokens = FEW_TOKENS if num_tokens <= FEW_TOKENS else 128 if columns <= 128 else 64
    ahead = STAGE_BYTES // ((tokens + columns) * 64 * element_size)
    return ContextTiles(tokens, 64, 4 if tokens == FEW_TOKENS else 8, min(ahead, 5))


@triton.jit
def _chosen(values, index, COUNT: tl.constexpr):
    """values[index] for an index of run time, which Triton does not allow in a tuple."""
    value = values[0]
    for other in tl.static_range(1, COUNT):
        value = tl.where(index == other, values[other], value)
    return value


@triton.jit
def _pair_dim(
    pair, side, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The dimension of a head that is one side (0 or 1) of a pair.

    Interleaved RoPE turns neighbours; neox RoPE turns dimension p with p + ROTARY_SIZE / 2. What is
    not turned, beyond ROTARY_SIZE, makes pairs that only share a thread.
    """
    if INTERLEAVED:
        dim = 2 * pair + side
    else:
        turned: tl.constexpr = ROTARY_SIZE // 2
        rest: tl.constexpr = HEAD_SIZE // 2 - turned
        dim = tl.where(pair < turned, pair + side * turned, pair + turned + side * rest)
    return dim


# Slots and positions are slices that start anywhere, and every step has another number of tokens:
# none of that may compile the kernel again.
@triton.jit(
    do_not_specialize=["num_tokens", "slots_stride"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def context_kv_kernel(
    hidden, weight, bias, k_norm, cos_sin, positions, caches, slots,
    num_tokens, eps,
    hidden_stride, weight_stride, cos_sin_stride, slots_stride,
    page_stride, slot_stride, head_stride, SLOTS_OF: tl.constexpr,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One head for one tile of tokens. Grid: token tiles * layers * 2 * KV heads.

    Head ``column`` of the product is KV head column % NUM_KV_HEADS of caches[column //
    NUM_KV_HEADS]; ``caches`` holds the key and the value cache of each layer in turn. The slots of
    layer l are row SLOTS_OF[l] of ``slots``.
    """
    NUM_COLUMNS: tl.constexpr = NUM_LAYERS * 2 * NUM_KV_HEADS
    # Programs that run at once share their token tiles and few heads.
    num_tiles = tl.cdiv(num_tokens, BLOCK_M)
    first_tile = tl.program_id(0) // (GROUP * NUM_COLUMNS) * GROUP
    in_group = tl.program_id(0) % (GROUP * NUM_COLUMNS)
    group_tiles = tl.minimum(num_tiles - first_tile, GROUP)
    tile = first_tile + in_group % group_tiles
    column = in_group // group_tiles

    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slots += _chosen(SLOTS_OF, column // (2 * NUM_KV_HEADS), NUM_LAYERS).to(tl.int64) * slots_stride
    slot = tl.load(slots + token, token < num_tokens, other=-1).to(tl.int64)
    is_stored = slot >= 0

    # The product, [tokens, columns]; column c is side c % 2 of pair c // 2.
    in_head = tl.arange(0, PADDED_SIZE)
    is_dim = in_head < HEAD_SIZE
    dim = _pair_dim(in_head // 2, in_head % 2, HEAD_SIZE, ROTARY_SIZE, INTERLEAVED)
    in_block = tl.arange(0, BLOCK_K)
    first_token = tile * BLOCK_M
    in_tile = tl.minimum(token, num_tokens - 1) - first_token  # behind the end: not stored
    hidden += first_token.to(tl.int64) * hidden_stride
    weight += column.to(tl.int64) * HEAD_SIZE * weight_stride
    hidden_at = in_tile[:, None] * hidden_stride + in_block[None, :]
    weight_at = dim[None, :] * weight_stride + in_block[:, None]
    acc = tl.zeros([BLOCK_M, PADDED_SIZE], tl.float32)
    for start in range(0, HIDDEN_SIZE, BLOCK_K):
        if HIDDEN_SIZE % BLOCK_K == 0 and HEAD_SIZE == PADDED_SIZE:
            x = tl.load(hidden + start + hidden_at)
            w = tl.load(weight + start + weight_at)
        else:
            is_hidden = start + in_block < HIDDEN_SIZE
            x = tl.load(hidden + start + hidden_at, is_hidden[None, :], other=0.0)
            w = tl.load(weight + start + weight_at, is_hidden[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:  # Triton's interpreter cannot multiply bf16; products are exact in fp32
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + column * HEAD_SIZE + dim, is_dim, other=0.0).to(tl.float32)[None, :]

    # [tokens, pairs] each: the two sides.
    HALF: tl.constexpr = PADDED_SIZE // 2
    first, second = tl.split(tl.reshape(acc, [BLOCK_M, HALF, 2]))
    pair = tl.arange(0, HALF)
    is_pair = pair < HEAD_SIZE // 2
    dim_1 = _pair_dim(pair, 0, HEAD_SIZE, ROTARY_SIZE, INTERLEAVED)
    dim_2 = _pair_dim(pair, 1, HEAD_SIZE, ROTARY_SIZE, INTERLEAVED)
    if column // NUM_KV_HEADS % 2 == 0:
        norm = k_norm + column // (2 * NUM_KV_HEADS) * HEAD_SIZE
        norm_1 = tl.load(norm + dim_1, is_pair, other=0.0).to(tl.float32)
        norm_2 = tl.load(norm + dim_2, is_pair, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        first = first * scale * norm_1[None, :]
        second = second * scale * norm_2[None, :]
        # A token without a slot may have any position.
        position = tl.load(positions + token, is_stored, other=0).to(tl.int64)
        angle_at = cos_sin + position[:, None] * cos_sin_stride + pair[None, :]
        is_turned = is_stored[:, None] & (pair < ROTARY_SIZE // 2)[None, :]
        cos = tl.load(angle_at, is_turned, other=1.0).to(tl.float32)
        sin = tl.load(angle_at + ROTARY_SIZE // 2, is_turned, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned

    cache = _chosen(caches, column // NUM_KV_HEADS, 2 * NUM_LAYERS)
    in_cache = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    head_at = cache + (in_cache + column % NUM_KV_HEADS * head_stride)[:, None]
    dtype = cache.dtype.element_ty
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), [BLOCK_M, PADDED_SIZE])
        tl.store(head_at + in_head[None, :], both.to(dtype), is_stored[:, None] & is_dim[None, :])
    else:
        is_written = is_stored[:, None] & is_pair[None, :]
        tl.store(head_at + dim_1[None, :], first.to(dtype), is_written)
        tl.store(head_at + dim_2[None, :], second.to(dtype), is_written)


# False where Triton interprets kernels on a CPU.
IS_COMPILED = isinstance(context_kv_kernel, triton.JITFunction)


@dataclass(frozen=True)
class ContextWeights:
    """What turns normalized hidden states into keys and values, for L layers and H KV heads.

    weight ``[L * 2 * H * head_size, hidden]``: for each layer its key heads, then its value heads.
    bias: the same rows, or None. k_norm ``[L, head_size]``, of the keys' RMSNorm; eps: added to the
    mean square. cos_sin ``[positions, rotary_size]``: cosines, then sines; dimensions of a head
    beyond rotary_size are not turned. is_neox: RoPE turns halves, otherwise neighbours.
    weight, bias and k_norm have one dtype: fp16, bf16 or fp32.
    """

    weight: Tensor
    bias: Tensor | None
    k_norm: Tensor
    eps: float
    cos_sin: Tensor
    is_neox: bool


def have_one_layout(caches: Sequence[PagedKV]) -> bool:
    """Whether the kernel can write these caches together: one shape, one stride, one dtype."""
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
    """Compute the keys and values of context tokens and write them into every layer's cache.

    Never waits for the device, and a CUDA graph can capture it. Two tokens of one call must not
    share a slot of a layer.

    Args:
        hidden: ``[tokens, hidden]``, normalized, in the weight's dtype.
        positions: ``[tokens]`` int64 or int32; those of tokens without a slot are not read.
        caches: of each layer, in the weight's dtype, all of the same shape and strides.
        slots: of each layer ``[tokens]`` int64 or int32, page * page_size + slot in the page; a
            negative slot is not written.
        tiles: None for those of ``context_tiles``.

    Raises:
        ValueError: tensors that do not fit together, with both values.
    """
    _check(hidden, positions, weights, caches, slots)
    num_tokens, hidden_size = hidden.shape
    if num_tokens == 0:
        return
    first = caches[0]
    _, page_size, num_kv_heads, head_size = first.key.shape
    tiles = tiles or context_tiles(num_tokens, head_size, hidden.element_size())
    page_stride, slot_stride, head_stride, _ = first.key.stride()
    rows, row_of = _rows(slots)
    grid = (triton.cdiv(num_tokens, tiles.tokens) * len(caches) * 2 * num_kv_heads,)
    context_kv_kernel[grid](
        hidden, weights.weight, weights.bias, weights.k_norm, weights.cos_sin, positions,
        tuple(tensor for cache in caches for tensor in (cache.key, cache.value)), rows,
        num_tokens, weights.eps,
        hidden.stride(0), weights.weight.stride(0), weights.cos_sin.stride(0), rows.stride(0),
        page_stride, slot_stride, head_stride, SLOTS_OF=row_of,
        NUM_LAYERS=len(caches), NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size,
        PADDED_SIZE=max(16, next_power_of_2(head_size)), ROTARY_SIZE=weights.cos_sin.shape[1],
        INTERLEAVED=not weights.is_neox, HIDDEN_SIZE=hidden_size, PAGE_SIZE=page_size,
        HAS_BIAS=weights.bias is not None, BLOCK_M=tiles.tokens, BLOCK_K=tiles.hidden,
        GROUP=TILE_GROUP, UPCAST=not IS_COMPILED,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _rows(slots: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """The distinct slots as ``[rows, tokens]``, and each layer's row.

    All layers of a group of vLLM's KV cache are given the same tensor. It is copied only where
    there are several groups.
    """
    distinct = {each.data_ptr(): each for each in slots}
    order = list(distinct)
    row_of = tuple(order.index(each.data_ptr()) for each in slots)
    return slots[0][None] if len(order) == 1 else torch.stack(list(distinct.values())), row_of


def _check(
    hidden: Tensor,
    positions: Tensor,
    weights: ContextWeights,
    caches: Sequence[PagedKV],
    slots: Sequence[Tensor],
) -> None:
    first = caches[0].key
    _, _, num_kv_heads, head_size = first.shape
    rows = len(caches) * 2 * num_kv_heads * head_size
    rotary_size = weights.cos_sin.shape[1]
    dtype = [hidden.dtype]
    expect("hidden", hidden, (len(positions), weights.weight.shape[1]), QUERY_DTYPES)
    expect("weight", weights.weight, (rows, None), dtype)
    expect("k_norm", weights.k_norm, (len(caches), head_size), dtype)
    if weights.bias is not None:
        expect("bias", weights.bias, (rows,), dtype)
    for layer, each in enumerate(slots):
        expect(f"slots of layer {layer}", each, (len(positions),), [torch.int32, torch.int64])
    if len(slots) != len(caches):
        raise ValueError(f"slots of {len(slots)} layers for the caches of {len(caches)}")
    if head_size % 2 or head_size > MAX_CONTEXT_HEAD_SIZE:
        raise ValueError(f"head size is {head_size}, allowed: even, to {MAX_CONTEXT_HEAD_SIZE}")
    if rotary_size % 2 or rotary_size > head_size:
        raise ValueError(f"cos_sin has {rotary_size} columns, allowed: even, to {head_size}")
    if not have_one_layout(caches) or first.dtype != hidden.dtype:
        layouts = [(list(c.key.shape), c.key.stride(), c.key.dtype) for c in caches]
        raise ValueError(f"caches are {layouts}, expected one layout, {hidden.dtype}")
