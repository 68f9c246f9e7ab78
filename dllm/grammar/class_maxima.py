"""The best token of each class of a grammar in each row of logits, on a GPU, in Triton.

Tokens are listed class by class, in chunks of one class each (`device`). A program reduces some
chunks of one row and merges each with the row's other chunks of that class by an atomic maximum of
(logit, -token) in one integer of 64 bits, whose order does not depend on who comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.grammar import device
from dllm.grammar.device import CHUNK, PackedTables, pointers

NO_TABLE = tl.constexpr(device.NO_TABLE)
HIGHEST = tl.constexpr(0x7FFFFFFF)
NOTHING = -(2**63)


class ClassMaxima(NamedTuple):
    """The class maxima of N rows; K is the number of classes of the largest table."""

    best: Tensor  # [N, K] fp32; -inf for classes that a row's table does not have
    token: Tensor  # [N, K] int32, the lowest id with it; -1 there


def class_maxima(
    logits: Tensor, tables: PackedTables, table_of: Tensor, chunks: int = 16
) -> ClassMaxima:
    """The best token of each class in each row; NaN counts as -inf.

    Args:
        logits: [N, V] fp32 or bf16.
        table_of: [N] int32, each row's table; `NO_TABLE` for rows without one.
        chunks: of a program, a power of two; no result depends on it.
    """
    num_rows, most = len(logits), tables.most_classes
    assert logits.stride(1) == 1, logits.stride()
    keys = torch.full((num_rows, most), NOTHING, dtype=torch.int64, device=logits.device)
    if num_rows and tables.most_chunks:
        _chunk_kernel[(num_rows, triton.cdiv(tables.most_chunks, chunks))](
            logits, logits.stride(0), table_of, pointers(tables), keys, most,
            CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
    # The upper half is the logit with its bits in order, the lower one counts tokens backwards.
    ordered = (keys >> 32).int()
    best = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    token = (0x7FFFFFFF - (keys & 0xFFFFFFFF)).int()
    is_there = keys != NOTHING
    return ClassMaxima(torch.where(is_there, best, -torch.inf), torch.where(is_there, token, -1))


@triton.jit(do_not_specialize=["most"])
def _chunk_kernel(
    logits, row_stride, table_of, tables, keys, most, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Class maxima of CHUNKS chunks of one row, merged into ``keys`` [rows, classes] int64.

    Grid: (rows, blocks of CHUNKS chunks).
    """
    row = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + row)
    if table == NO_TABLE:
        return
    index = tl.load(tables.first_chunk + table) + tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    is_there = index < tl.load(tables.first_chunk + table + 1)
    cells = index.to(tl.int64)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    token = tl.load(tables.chunk + cells, mask=is_there[:, None], other=0)
    x = tl.load(logits + row * row_stride + token, mask=is_there[:, None], other=0.0)
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & HIGHEST)
    key = (ordered.to(tl.int64) << 32) + (-token + HIGHEST).to(tl.int64)
    kind = tl.load(tables.chunk_class + index, mask=is_there, other=0)
    tl.atomic_max(keys + row * most + kind, tl.max(key, axis=1), mask=is_there)
