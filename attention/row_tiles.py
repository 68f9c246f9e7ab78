"""Which rows a program works on and which keys they see: the device side of `masks.py`.

A *pair* is a row of a query span and a query head of one KV head's group; pairs are numbered
row * GROUP + head. A *row tile* is BLOCK_M consecutive pairs of one sequence and KV head, so that K
and V are loaded once for all heads that share them and no group size wastes rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence whose row tiles include ``tile``: the last i with first_tile(i) <= tile.

    first_tile(i) = query_start_loc[i] * GROUP // BLOCK_M + i leaves room for every sequence's
    ceil(pairs / BLOCK_M) tiles without knowing the others' lengths. Binary search.
    """
    low: tl.int32 = 0
    high = num_seqs
    while low < high:
        mid = (low + high) // 2
        first_tile = tl.load(query_start_loc + mid) * GROUP // BLOCK_M + mid
        if first_tile <= tile:
            low = mid + 1
        else:
            high = mid
    return low - 1


@triton.jit
def pairs_of_tile(query_start_loc, seq, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The (row, head) pairs of a tile: its first token, its first row, then per pair the distance
    from that row, the head within the group, and whether the pair exists.

    Pairs beyond the span repeat its last one: they load valid memory and change no bound. The
    loads are volatile, so that the compiler computes all this again for the output instead of
    keeping it in registers while the tile's keys go by.
    """
    query_start = tl.load(query_start_loc + seq, volatile=True)
    num_pairs = (tl.load(query_start_loc + seq + 1, volatile=True) - query_start) * GROUP
    first_pair = (tile - query_start * GROUP // BLOCK_M - seq) * BLOCK_M
    first_row = first_pair // GROUP
    pair = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pair < num_pairs
    pair = tl.minimum(pair, num_pairs - 1)
    return query_start + first_row, first_row, pair // GROUP - first_row, pair % GROUP, is_pair


@triton.jit
def split_point_of(bidirectional_from, seq, query_len, IS_BOOL: tl.constexpr):
    """The first bidirectional row of a sequence, in [0, query_len]; True means a causal pass."""
    value = tl.load(bidirectional_from + seq)
    if IS_BOOL:
        point = tl.where(value != 0, query_len, 0)
    else:
        point = tl.minimum(tl.maximum(value, 0), query_len)
    return point


@triton.jit
def row_bounds(row, query_len, seq_len, split_point, WINDOW: tl.constexpr, ANCHORED: tl.constexpr):
    """`masks.visible_range` for a vector of rows: the keys [start, stop) that each row sees."""
    context_len = seq_len - query_len
    pos = context_len + row
    is_causal = row < split_point
    stop = tl.where(is_causal, pos + 1, seq_len)
    start = tl.zeros_like(pos)
    if WINDOW > 0:
        if ANCHORED:
            start = tl.where(is_causal, pos, context_len + split_point) - (WINDOW - 1)
        else:
            start = pos - (WINDOW - 1)
            stop = tl.minimum(stop, pos + WINDOW)
        start = tl.maximum(start, 0)
    stop = tl.minimum(tl.maximum(stop, 0), seq_len)
    return start, stop
