"""From static shapes to a launch plan. Pure Python: no device access, nothing measured.

Long contexts are split along the keys, so that one request fills the chip. How the keys of a
sequence are cut decides how fp32 sums are grouped, hence the bits, so it must not depend on who
shares the batch: `num_splits` looks at that sequence's own lengths only, and the kernel evaluates
it on the device, where the lengths are. It asks for as many parts as bring the sequence's programs
to TARGET_PROGRAMS, none shorter than min_keys_per_split. The height of a row tile decides too
(which keys need a mask, which matrix instruction runs): it follows from max_query_len, so calls
that shall agree to the bit are given the same bound, and not the longest span of each batch.

The plan answers what is left, from upper bounds that the host knows: whether any sequence can be
split at all (a kernel without the machinery otherwise), how many programs share the parts of one
row tile (one is enough where row tiles alone fill the chip), and how much workspace that takes.
A CUDA graph captures one plan; it holds for every content of the tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attention.masks import Window
from attention.tuning import TARGET_PROGRAMS, TileConfig, next_power_of_2

MIN_BLOCK_M = 16  # what tl.dot takes


@dataclass(frozen=True)
class BatchShape:
    """Everything about a call that is known without looking at the device.

    num_tokens counts padding; max_seq_len and max_query_len are upper bounds, in tokens.
    """

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_query_len: int
    max_seq_len: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionPlan:
    """How one call is launched.

    block_m: rows x heads of a program, at most config.block_m; num_row_tiles: upper bound on row
    tiles over all sequences, the grid's first axis; split_programs: the grid's third axis;
    block_v: output columns of a program, value_blocks: how many programs share a head's columns;
    max_splits: most parts a sequence can have here (1: no splitting, no workspace).
    The workspace has num_partial_rows rows per part: one a token, or, where that is less,
    partial_rows_per_seq (else 0) for each sequence.
    """

    config: TileConfig
    block_m: int
    num_row_tiles: int
    block_v: int
    value_blocks: int
    max_splits: int
    split_programs: int
    num_partial_rows: int
    partial_rows_per_seq: int

    @property
    def is_split(self) -> bool:
        """Whether the kernel that can split runs, and the merge of the parts after it."""
        return self.max_splits > 1

    def workspace_elements(self, shape: BatchShape) -> int:
        """fp32 elements of workspace: an accumulator, a max and a sum per part, row and head."""
        if not self.is_split:
            return 0
        return self.max_splits * self.num_partial_rows * shape.num_heads * (shape.head_size + 2)


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)


def visible_keys(query_len: int, seq_len: int, window: Window | None) -> int:
    """Upper bound on the keys that the rows of one span see together: always the last ones."""
    return seq_len if window is None else min(seq_len, query_len + window.size - 1)


def num_splits(query_len: int, num_keys: int, shape: BatchShape, config: TileConfig) -> int:
    """Parts into which the keys of one sequence are split; a function of this sequence alone.

    num_keys: see `visible_keys`. `splits.num_splits_on_device` computes the same.
    """
    programs = ceil_div(query_len * shape.group, config.block_m) * _head_programs(shape, config)
    by_keys = ceil_div(num_keys, config.min_keys_per_split)
    return max(1, min(config.max_splits, by_keys, TARGET_PROGRAMS // max(programs, 1)))


def _head_programs(shape: BatchShape, config: TileConfig) -> int:
    """Programs that work on the same row tile, without splitting: the grid's second axis."""
    return shape.num_kv_heads * ceil_div(shape.head_size, config.columns(shape.head_size))


def most_splits(shape: BatchShape, config: TileConfig, window: Window | None) -> int:
    """The most parts that any sequence within the bounds of ``shape`` can have.

    More rows see more keys through a window, but have more programs. With each number of programs
    that still allows two parts, the longest span counts.
    """
    most_tiles = TARGET_PROGRAMS // (2 * _head_programs(shape, config))
    longest = (tiles * config.block_m // shape.group for tiles in range(1, most_tiles + 1))
    spans = {min(max(rows, 1), shape.max_query_len) for rows in longest}
    return max(
        (
            num_splits(rows, visible_keys(rows, shape.max_seq_len, window), shape, config)
            for rows in spans
        ),
        default=1,
    )


@functools.lru_cache(maxsize=256)
def plan_attention(shape: BatchShape, config: TileConfig, window: Window | None) -> AttentionPlan:
    """The launch plan of a batch shape; layers of one step share it.

    The first axis of the grid has floor(num_tokens * group / block_m) + num_seqs programs: at
    least sum(ceil(query_len * group / block_m)) for any way of cutting the tokens into sequences.
    """
    rows = shape.max_query_len * shape.group
    block_m = min(config.block_m, max(MIN_BLOCK_M, next_power_of_2(rows)))
    num_row_tiles = shape.num_tokens * shape.group // block_m + shape.num_seqs

    max_splits = most_splits(shape, config, window)
    head_programs = _head_programs(shape, config)
    is_filled = num_row_tiles * head_programs > TARGET_PROGRAMS
    split_tiles = max(1, TARGET_PROGRAMS // 2 // head_programs)  # a longer span is never split
    split_rows = ceil_div(split_tiles * config.block_m, shape.group)
    is_by_token = shape.num_tokens <= shape.num_seqs * split_rows
    return AttentionPlan(
        config=config,
        block_m=block_m,
        num_row_tiles=num_row_tiles,
        block_v=config.columns(shape.head_size),
        value_blocks=head_programs // shape.num_kv_heads,
        max_splits=max_splits,
        split_programs=1 if is_filled else max_splits,
        num_partial_rows=shape.num_tokens if is_by_token else shape.num_seqs * split_rows,
        partial_rows_per_seq=0 if is_by_token else split_rows,
    )
