"""From the shapes of a call to the way its kernels are launched: grid, tile sizes, workspace.

Nothing is read from the device and nothing is measured: a CUDA graph captures one plan and may be
replayed with any content of the tensors.

A canvas behind a long context has few query rows: its row tiles alone leave most of the GPU idle.
So the keys of a long sequence are split into parts for different programs, and the results merged
(`splits.py`): as many parts as give a sequence TARGET_PROGRAMS programs, none with fewer keys than
`TileConfig.keys_per_split`, which is less where a window leaves few visible keys.

One sequence must give the same bits whichever sequences share its batch, and two choices change
how fp32 sums are rounded:

- where its keys are cut. `num_splits` uses nothing but the sequence's own lengths. They are on the
  device, so the kernels evaluate the same rule there.
- the height of a row tile, which decides which keys are masked and which matrix instruction runs.
  It follows from max_query_len. So give calls that have to agree the same bound, not the length of
  the longest span in each batch.

The rest follows from upper bounds that the host knows. None of it compiles a kernel again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dllm.attention.tuning import TARGET_PROGRAMS, TileConfig, next_power_of_2

MIN_BLOCK_M = 16  # tl.dot takes no fewer rows


@dataclass(frozen=True)
class BatchShape:
    """What is known without looking at the device, in tokens; num_tokens counts padding."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_query_len: int  # an upper bound
    max_seq_len: int  # an upper bound

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionPlan:
    """How one call is launched."""

    config: TileConfig
    block_m: int  # (row, head) pairs of a row tile, at most config.block_m
    num_row_tiles: int  # the grid's first axis; an upper bound on those of all sequences
    block_v: int  # output columns of a program
    value_blocks: int  # how many programs share the columns of a head
    max_splits: int  # the most parts of a sequence here; 1: no splitting, no workspace
    split_programs: int  # the grid's third axis; the parts of a row tile are dealt to these
    # Rows of the workspace for each part: one for each token, or partial_rows_per_seq for each
    # sequence where that is less (else it is 0).
    num_partial_rows: int
    partial_rows_per_seq: int

    @property
    def is_split(self) -> bool:
        """Then `merge_splits_kernel` runs after the main kernel."""
        return self.max_splits > 1

    def workspace_elements(self, shape: BatchShape) -> int:
        """fp32: an accumulator, a max and a sum per part, row and head."""
        if not self.is_split:
            return 0
        return self.max_splits * self.num_partial_rows * shape.num_heads * (shape.head_size + 2)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def visible_keys(query_len: int, seq_len: int, window: int | None) -> int:
    """An upper bound on those that the rows see together."""
    return seq_len if window is None else min(seq_len, query_len + window - 1)


def num_splits(
    query_len: int, seq_len: int, shape: BatchShape, config: TileConfig, window: int | None
) -> int:
    """A function of this sequence alone. `splits.num_splits_on_device` computes the same."""
    num_keys = visible_keys(query_len, seq_len, window)
    programs = ceil_div(query_len * shape.group, config.block_m) * _head_programs(shape, config)
    by_keys = ceil_div(num_keys, config.keys_per_split(window))
    return max(1, min(config.max_splits, by_keys, TARGET_PROGRAMS // max(programs, 1)))


def _head_programs(shape: BatchShape, config: TileConfig) -> int:
    """The grid's second axis: programs of one row tile, without splitting."""
    return shape.num_kv_heads * ceil_div(shape.head_size, config.columns(shape.head_size))


def most_splits(shape: BatchShape, config: TileConfig, window: int | None) -> int:
    """Of any sequence within the bounds of ``shape``.

    A longer span sees more keys through a window, which allows more parts, but has more row tiles,
    which allows fewer. So for each number of row tiles that allows two parts the longest is tried.
    """
    most_tiles = TARGET_PROGRAMS // (2 * _head_programs(shape, config))
    longest = (tiles * config.block_m // shape.group for tiles in range(1, most_tiles + 1))
    spans = {min(max(rows, 1), shape.max_query_len) for rows in longest}
    return max(
        (num_splits(rows, shape.max_seq_len, shape, config, window) for rows in spans),
        default=1,
    )


@functools.lru_cache(maxsize=256)
def plan_attention(shape: BatchShape, config: TileConfig, window: int | None) -> AttentionPlan:
    """Cached: the layers of one step ask for the same.

    The grid's first axis is enough however the tokens are divided among sequences:
    floor(num_tokens * group / block_m) + num_seqs >= sum(ceil(query_len * group / block_m)).
    """
    rows = shape.max_query_len * shape.group
    block_m = min(config.block_m, max(MIN_BLOCK_M, next_power_of_2(rows)))
    num_row_tiles = shape.num_tokens * shape.group // block_m + shape.num_seqs

    max_splits = most_splits(shape, config, window)
    head_programs = _head_programs(shape, config)
    is_filled = num_row_tiles * head_programs > TARGET_PROGRAMS
    # The longest span that can be split: with more row tiles two parts would be too many programs.
    split_tiles = max(1, TARGET_PROGRAMS // 2 // head_programs)
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
