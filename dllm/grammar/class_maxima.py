"""The best token of each class, and the best class of each label, on a GPU, in Triton.

Members are listed group by group (tokens by class, classes by label), in chunks of one group each
(`device`). A program reduces some chunks of one row and merges each with the row's other chunks of
that group by an atomic maximum of (value, -member) in one integer of 64 bits, whose order does not
depend on who comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.grammar import device
from dllm.grammar.device import CHUNK, LABEL_CHUNK, PackedTables

NO_TABLE = tl.constexpr(device.NO_TABLE)
HIGHEST = tl.constexpr(0x7FFFFFFF)
NOTHING = -(2**63)


class Maxima(NamedTuple):
    """Of N rows and G groups: the classes, or the labels, of the table that has most."""

    best: Tensor  # [N, G] fp32; -inf for groups that a row's table does not have
    member: Tensor  # [N, G] int32, the lowest token, or class, with it; -1 there


class Groups(NamedTuple):
    """Members in groups, of several tables."""

    chunk: Tensor  # [chunks, members] int32, of one group
    chunk_group: Tensor  # [chunks] int32
    first: Tensor  # [tables + 1] int32, the chunk at which each table begins
    most_chunks: int  # of one table


def class_maxima(
    logits: Tensor, tables: PackedTables, table_of: Tensor, members: int = 4096
) -> Maxima:
    """The best token of each class in each row; NaN counts as -inf.

    Args:
        logits: [N, V] fp32 or bf16.
        table_of: [N] int32, each row's table; `NO_TABLE` for rows without one.
        members: of a program, a power of two; no result depends on it.
    """
    tokens = Groups(tables.chunk, tables.chunk_class, tables.first_chunk, tables.most_chunks)
    chunks = max(members // CHUNK, 1)
    return _maxima(logits, tokens, table_of, tables.most_classes, chunks)


def label_maxima(
    maxima: Maxima, tables: PackedTables, table_of: Tensor, members: int = 4096
) -> Maxima:
    """The best class of each label in each row. ``table_of``, ``members``: as `class_maxima`."""
    chunk, first = tables.label_chunk, tables.first_label_chunk
    classes = Groups(chunk, tables.chunk_label, first, tables.most_label_chunks)
    chunks = max(members // LABEL_CHUNK, 1)
    return _maxima(maxima.best, classes, table_of, tables.most_labels, chunks)


def _maxima(values: Tensor, groups: Groups, table_of: Tensor, most: int, chunks: int) -> Maxima:
    num_rows = len(values)
    assert values.stride(1) == 1, values.stride()
    keys = torch.full((num_rows, most), NOTHING, dtype=torch.int64, device=values.device)
    if num_rows and groups.most_chunks:
        _chunk_kernel[(num_rows, triton.cdiv(groups.most_chunks, chunks))](
            values, values.stride(0), table_of, groups.chunk, groups.chunk_group, groups.first,
            keys, most, CHUNKS=chunks, CHUNK=groups.chunk.shape[1], num_warps=8,
        )  # fmt: skip
    # The upper half is the value with its bits in order, the lower one counts members backwards.
    ordered = (keys >> 32).int()
    best = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    member = (0x7FFFFFFF - (keys & 0xFFFFFFFF)).int()
    is_there = keys != NOTHING
    return Maxima(torch.where(is_there, best, -torch.inf), torch.where(is_there, member, -1))


@triton.jit(do_not_specialize=["row_stride", "most"])
def _chunk_kernel(
    values, row_stride, table_of, chunk, chunk_group, first_chunk, keys, most,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Maxima of CHUNKS chunks of one row, merged into ``keys`` [rows, groups] int64.

    Grid: (rows, blocks of CHUNKS chunks).
    """
    row = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + row)
    if table == NO_TABLE:
        return
    index = tl.load(first_chunk + table) + tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    is_there = index < tl.load(first_chunk + table + 1)
    cells = index.to(tl.int64)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    member = tl.load(chunk + cells, mask=is_there[:, None], other=0)
    x = tl.load(values + row * row_stride + member, mask=is_there[:, None], other=0.0)
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & HIGHEST)
    key = (ordered.to(tl.int64) << 32) + (-member + HIGHEST).to(tl.int64)
    group = tl.load(chunk_group + index, mask=is_there, other=0)
    tl.atomic_max(keys + row * most + group, tl.max(key, axis=1), mask=is_there)
