"""From static shapes to a launch plan. Pure Python: no device access, nothing measured.

Long contexts are split along the keys, so that one request fills the chip. Two questions are kept
apart, because a sequence's bits must not depend on who shares its batch:

*Into how many parts?* decides how fp32 sums are grouped, hence the bits. The kernel answers it per
sequence, on the device, from that sequence's own lengths (`num_splits` is the same rule in Python):
as many parts as bring its programs to TARGET_PROGRAMS, none shorter than min_keys_per_split.

*Who computes the parts?* does not touch the bits, and is answered here from static upper bounds:

    none       no sequence can be long enough to be split: the kernel without any of this
    parallel   few row tiles: one program for each part writes a partial result to the workspace,
               a second kernel merges them in order
    serial     row tiles alone fill the chip: one program goes through the parts of its tile in
               order and merges each into the workspace, with the arithmetic of the second kernel

A CUDA graph captures one plan; it holds for every content of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attention.masks import Window
from attention.tuning import TARGET_PROGRAMS, TileConfig, next_power_of_2

SplitMode = Literal["none", "serial", "parallel"]
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
    workspace_slots: partial results per token and head (0 without splitting).
    """

    config: TileConfig
    block_m: int
    num_row_tiles: int
    split_mode: SplitMode
    split_programs: int
    workspace_slots: int

    def workspace_elements(self, shape: BatchShape) -> int:
        """fp32 elements of workspace: per slot, token and head an accumulator, a max and a sum."""
        rows = self.workspace_slots * shape.num_tokens * shape.num_heads
        return rows * (shape.head_size + 2)


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)


def visible_keys(query_len: int, seq_len: int, window: Window | None) -> int:
    """Upper bound on the keys that the rows of one span see together: always the last ones."""
    return seq_len if window is None else min(seq_len, query_len + window.size - 1)


def num_splits(query_len: int, num_keys: int, shape: BatchShape, config: TileConfig) -> int:
    """Parts into which the keys of one sequence are split; a function of this sequence alone.

    num_keys: see `visible_keys`. The kernel's `_num_splits` computes the same on the device.
    """
    programs = ceil_div(query_len * shape.group, config.block_m) * shape.num_kv_heads
    by_keys = ceil_div(num_keys, config.min_keys_per_split)
    return max(1, min(config.max_splits, by_keys, TARGET_PROGRAMS // max(programs, 1)))


def plan_attention(shape: BatchShape, config: TileConfig, window: Window | None) -> AttentionPlan:
    """The launch plan of a batch shape.

    The first axis of the grid has floor(num_tokens * group / block_m) + num_seqs programs: at
    least sum(ceil(query_len * group / block_m)) for any way of cutting the tokens into sequences.
    """
    rows = shape.max_query_len * shape.group
    block_m = min(config.block_m, max(MIN_BLOCK_M, next_power_of_2(rows)))
    num_row_tiles = shape.num_tokens * shape.group // block_m + shape.num_seqs

    num_keys = visible_keys(shape.max_query_len, shape.max_seq_len, window)
    most_splits = num_splits(1, num_keys, shape, config)
    split_mode: SplitMode
    if most_splits == 1:
        split_mode, split_programs, slots = "none", 1, 0
    elif num_row_tiles * shape.num_kv_heads > TARGET_PROGRAMS:
        split_mode, split_programs, slots = "serial", 1, 1
    else:
        split_mode, split_programs, slots = "parallel", most_splits, most_splits
    return AttentionPlan(config, block_m, num_row_tiles, split_mode, split_programs, slots)
