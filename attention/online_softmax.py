"""The inner loop of attention: a running softmax of a row tile over tiles of keys and values.

FlashAttention-2 (Dao 2023, arXiv:2307.08691), on a paged cache. `canvas_attention.py` says which
tiles of keys a row tile sees.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b with fp32 sums.

    UPCAST is for Triton's interpreter, which cannot multiply bf16. A product of two bf16 numbers is
    exact in fp32, so the result is the same.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _pages_of_tile(table, tile, low, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """One page if the tile lies in it, else one for each key.

    Of a tile without keys in [low, high) nothing is read.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + tile * BLOCK_N // PAGE_SIZE, mask=tile * BLOCK_N < high, other=0)
    else:
        key_pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_read = (key_pos >= low) & (key_pos < high)
        page = tl.load(table + key_pos // PAGE_SIZE, mask=is_read, other=0)
    return page.to(tl.int64)


@triton.jit
def attend(
    acc, row_max, row_sum, q, row_start, row_stop,
    num_tiles, first_tile, skip_tile, skip_count, low, high,
    table, key_base, value_base,
    k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
    logit_scale, softcap,
    value_dim, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``num_tiles`` tiles of keys from first_tile on, without skip_count of them at skip_tile.

    MASKED: keys outside [low, high) are not loaded, and each row takes only the keys of its own
    [row_start, row_stop). Otherwise every row sees every key. Pages are looked up one tile ahead:
    else the compiler would start neither load of a page and its keys before it is needed.

    Shapes: acc [rows, value columns], row_max and row_sum [rows], q [rows, head size].
    """
    dim = tl.arange(0, PADDED_SIZE)
    in_tile = tl.arange(0, BLOCK_N)
    LOG2E_: tl.constexpr = 1.4426950408889634
    tile = tl.where(first_tile >= skip_tile, first_tile + skip_count, first_tile)
    page = _pages_of_tile(table, tile, low, high, PAGE_SIZE, BLOCK_N)
    for step in range(num_tiles):
        key_pos = tile * BLOCK_N + in_tile  # [keys]
        slot = key_pos % PAGE_SIZE
        k_offset = page * k_stride_page + slot * k_stride_slot
        v_offset = page * v_stride_page + slot * v_stride_slot
        tile = first_tile + step + 1
        tile = tl.where(tile >= skip_tile, tile + skip_count, tile)
        page = _pages_of_tile(table, tile, low, high, PAGE_SIZE, BLOCK_N)
        # K transposed, [head size, keys], and V, [keys, value columns].
        k_pointers = key_base + k_offset[None, :] + dim[:, None]
        v_pointers = value_base + v_offset[:, None] + value_dim[None, :]

        if MASKED:
            is_loaded = (key_pos >= low) & (key_pos < high)
            k = tl.load(k_pointers, is_loaded[None, :] & (dim < HEAD_SIZE)[:, None], other=0.0)
            v = tl.load(
                v_pointers, is_loaded[:, None] & (value_dim < HEAD_SIZE)[None, :], other=0.0
            )
        elif HEAD_SIZE == PADDED_SIZE:
            k = tl.load(k_pointers)
            v = tl.load(v_pointers)
        else:
            k = tl.load(k_pointers, mask=(dim < HEAD_SIZE)[:, None], other=0.0)
            v = tl.load(v_pointers, mask=(value_dim < HEAD_SIZE)[None, :], other=0.0)

        # [rows, keys]
        s = dot(q, k.to(q.dtype), tl.zeros([q.shape[0], BLOCK_N], tl.float32), UPCAST)
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1) saturates instead of overflowing
            x = s * (logit_scale / softcap)
            s = softcap * LOG2E_ * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E_ * x) + 1.0))
            to_log2 = 1.0  # s has the factor log2(e) already
        else:
            to_log2 = logit_scale * LOG2E_
        if MASKED:
            is_seen = (key_pos[None, :] >= row_start[:, None]) & (
                key_pos[None, :] < row_stop[:, None]
            )
            s = tl.where(is_seen, s, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(s, 1) * to_log2)
        if MASKED:  # a row that has seen no key yet must not compute -inf - -inf
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            safe_max = new_max
        p = tl.exp2(tl.fma(s, to_log2, -safe_max[:, None]))  # [rows, keys]
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        acc = dot(p.to(q.dtype), v.to(q.dtype), acc, UPCAST)
        row_max = new_max
    return acc, row_max, row_sum
