"""Which rows a Triton program works on, and which keys they see (`masks.py` on the device).

GROUP query heads share one KV head. A *pair* is one row of a query span with one of these heads;
pairs are numbered row * GROUP + head. A *row tile* is BLOCK_M consecutive pairs of one sequence and
KV head. So K and V are loaded once for all heads that share them, and a tile is full whatever the
group size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that row tile ``tile`` belongs to: the last i with first_tile(i) <= tile.

    first_tile(i) = query_start_loc[i] * GROUP // BLOCK_M + i. Sequence i needs
    ceil(pairs / BLOCK_M) tiles; the "+ i" leaves room for that rounding in every sequence before,
    so that their tiles need not be summed. A tile that is left over has no pairs. Binary search.
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
    """The (row, head) pairs of a tile.

    Returns the first token and the first row of the tile (scalars), then for each pair
    ``[BLOCK_M]``: its row minus the first row, its head within the group, and whether it exists.

    Pairs beyond the span repeat the span's last pair, so that they load valid memory and do not
    widen the range of keys. The loads are volatile: the kernel calls this again before it stores
    its output, and without that the compiler would keep the first results in registers during the
    whole loop over keys.
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
    """The first bidirectional row of a sequence, at most query_len; negative for an image.

    ``bidirectional_from`` holds that row, or with IS_BOOL a flag: True makes all rows causal.
    """
    value = tl.load(bidirectional_from + seq)
    if IS_BOOL:
        point = tl.where(value != 0, query_len, 0)
    else:
        point = tl.minimum(value, query_len)
    return point


@triton.jit
def row_bounds(
    row, query_len, seq_len, split_point,
    WINDOW: tl.constexpr, ANCHORED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The keys [start, stop) that each row sees: `masks.visible_range` for a vector of rows.

    row ``[BLOCK_M]``, rows of the span. WINDOW: 0 for none. ANCHORED: the kind of window.
    BLOCK_SIZE: of the model, 1 for causal heads.
    """
    context_len = seq_len - query_len
    pos = context_len + row
    is_causal = row < split_point
    if BLOCK_SIZE > 1:
        stop = tl.where(is_causal, (pos // BLOCK_SIZE + 1) * BLOCK_SIZE, seq_len)
    else:
        stop = tl.where(is_causal, pos + 1, seq_len)
    start = tl.zeros_like(pos)
    if WINDOW > 0:
        if ANCHORED:
            is_image = split_point < 0
            start = tl.where(is_causal | is_image, pos, context_len + split_point) - (WINDOW - 1)
            stop = tl.where(is_image, tl.minimum(stop, pos + WINDOW), stop)
        else:
            start = pos - (WINDOW - 1)
            stop = tl.minimum(stop, pos + WINDOW)
        start = tl.maximum(start, 0)
    stop = tl.minimum(tl.maximum(stop, 0), seq_len)
    return start, stop
