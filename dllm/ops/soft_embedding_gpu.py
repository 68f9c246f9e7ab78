"""The soft embedding on a GPU: a matrix product over the vocabulary that skips whole tiles.

`soft_embedding` explains what a row may leave out. Here:

1. One program for each row drops the lightest tiles, up to half of the budget, by a bisection over
   their masses (`RowStats.tile_mass`). For the other tiles it computes the smallest logit to keep.
2. For each block of rows, a product runs over the tiles that any of its rows needs. Probabilities
   are computed from the logits inside the kernel and never written to memory. A row that does not
   need a tile contributes zeros.

The lists of tiles stay on the device. The kernel reads their lengths, so the host never waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.ops.row_stats_gpu import OF_ROWS

if TYPE_CHECKING:
    from dllm.ops.row_stats import RowStats
    from dllm.ops.soft_embedding import Shard


@dataclass(frozen=True)
class ProductTiles:
    """How the product is cut; powers of two. The tile of tokens is that of the row statistics."""

    rows: int = 128
    hidden: int = 128
    splits: int = 4  # parts of a list of tiles: more programs when a step has a single canvas
    num_warps: int = 8
    num_stages: int = 3


def sparse_product_kernels(
    logits: Tensor,
    temperature: Tensor,
    stats: RowStats,
    shard: Shard,
    budget: float,
    tile: int,
    cut: ProductTiles,
) -> Tensor:
    """`dispatch.sparse_product` on a GPU: [N, hidden] in the shard's dtype.

    Args:
        tile: tokens of one tile of `stats.tile_mass`.
        cut: how the product is cut.
    """
    num_rows, vocab_size = logits.shape
    hidden = shard.weight.shape[1]
    num_tiles = stats.tile_mass.shape[1]
    assert num_tiles == triton.cdiv(vocab_size, tile), (num_tiles, vocab_size, tile)
    device = logits.device
    num_blocks = triton.cdiv(num_rows, cut.rows)
    is_kept = torch.zeros(num_blocks * cut.rows, num_tiles, dtype=torch.int8, device=device)
    least = torch.empty(num_rows, device=device)
    if num_rows == 0:
        return shard.weight.new_empty(0, hidden)
    _kept_tiles_kernel[(num_rows,)](
        stats.tile_mass, stats.peak, temperature, stats.log_z, stats.cutoff, is_kept, least,
        budget / 2, num_tiles, TILE=tile, TILES=triton.next_power_of_2(num_tiles), num_warps=4,
    )  # fmt: skip
    is_needed = is_kept.view(num_blocks, cut.rows, num_tiles).amax(dim=1)  # [blocks, tiles]
    # The needed tiles of each block of rows come first, in ascending order.
    needed = is_needed.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    num_needed = is_needed.sum(dim=1, dtype=torch.int32)
    parts = torch.empty(cut.splits, num_rows, hidden, dtype=torch.float32, device=device)
    _product_kernel[(num_blocks, triton.cdiv(hidden, cut.hidden), cut.splits)](
        logits, logits.stride(0), temperature, stats.peak, stats.log_z, least, is_kept,
        needed, num_needed, shard.weight, shard.weight.stride(0), parts,
        num_rows, vocab_size, num_tiles, hidden, shard.start, shard.end,
        ROWS=cut.rows, HIDDEN=cut.hidden, TILE=tile, SPLITS=cut.splits,
        UPCAST=not IS_COMPILED, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return parts.sum(dim=0).to(shard.weight.dtype)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _kept_tiles_kernel(
    tile_mass, peak, temperature, log_z, cutoff, is_kept, least,
    budget, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Which tiles a row keeps, and the smallest logit to keep in them.

    Dropped are the tiles with less mass than a threshold: the largest float for which the dropped
    tiles have at most `budget` in total.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    mass = tl.load(tile_mass + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    # A bisection over the bits of the threshold, from 0.0 to 2.0. The bits of floats >= 0, read as
    # integers, are in the same order as the floats.
    low, high = tl.full((), 0, tl.int32), tl.full((), 0x40000000, tl.int32)
    while low < high:
        middle = low + (high - low + 1) // 2
        left_out = tl.sum(tl.where(mass < middle.to(tl.float32, bitcast=True), mass, 0.0), 0)
        low = tl.where(left_out <= budget, middle, low)
        high = tl.where(left_out <= budget, high, middle - 1)
    keeps = (mass >= low.to(tl.float32, bitcast=True)) & (tile < num_tiles)
    tl.store(is_kept + row * num_tiles + tile, keeps.to(tl.int8), mask=tile < num_tiles)
    # With this floor the tokens left out of the kept tiles have at most `budget` in total.
    num_tokens = tl.maximum(tl.sum(keeps.to(tl.int32), 0), 1) * TILE
    log_p = tl.log(budget / num_tokens)
    lowest = tl.load(peak + row) + tl.load(temperature + row) * (tl.load(log_z + row) + log_p)
    lowest = tl.maximum(lowest, tl.load(cutoff + row))
    # At least the smallest finite float, so that tokens at -inf are never kept.
    tl.store(least + row, tl.maximum(lowest, -3.4028234663852886e38))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=OF_ROWS)
def _product_kernel(
    logits, row_stride, temperature, peak, log_z, least, is_kept,
    needed, num_needed, weight, weight_stride, parts,
    num_rows, vocab_size, num_tiles, hidden, start, end,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One part of the sum over tokens, for a block of rows and a block of hidden columns.

    UPCAST: multiply in fp32, for Triton's interpreter, which cannot multiply bf16.
    """
    block, split = tl.program_id(0), tl.program_id(2)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    is_row, is_column = row < num_rows, column < hidden
    x_max = tl.load(peak + row, mask=is_row, other=0.0)
    t = tl.load(temperature + row, mask=is_row, other=1.0)
    log_of_z = tl.load(log_z + row, mask=is_row, other=0.0)
    lowest = tl.load(least + row, mask=is_row, other=float("inf"))
    count = tl.load(num_needed + block)
    share = tl.cdiv(count, SPLITS)  # tiles of this program
    acc = tl.zeros((ROWS, HIDDEN), dtype=tl.float32)
    for index in range(split * share, tl.minimum((split + 1) * share, count)):
        tile = tl.load(needed + block * num_tiles + index)
        token = tile * TILE + tl.arange(0, TILE)  # [TILE]
        counts = tl.load(is_kept + row * num_tiles + tile, mask=is_row, other=0)
        x = tl.load(
            logits + row[:, None] * row_stride + token[None, :],
            mask=is_row[:, None] & (token < vocab_size)[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        p = tl.exp((x - x_max[:, None]) / t[:, None] - log_of_z[:, None])  # [ROWS, TILE]
        p = tl.where((x >= lowest[:, None]) & (counts > 0)[:, None], p, 0.0)
        is_ours = (token >= start) & (token < end)
        embedding = tl.load(  # [TILE, HIDDEN]
            weight + (token - start).to(tl.int64)[:, None] * weight_stride + column[None, :],
            mask=is_ours[:, None] & is_column[None, :],
            other=0.0,
        )
        p = p.to(weight.dtype.element_ty)
        if UPCAST:
            p = p.to(tl.float32)
            embedding = embedding.to(tl.float32)
        acc = tl.dot(p, embedding, acc, input_precision="ieee")
    target = parts + (split * num_rows + row)[:, None] * hidden + column[None, :]
    tl.store(target, acc, mask=is_row[:, None] & is_column[None, :])


# False where Triton interprets kernels on a CPU, which cannot multiply bf16.
IS_COMPILED = isinstance(_product_kernel, triton.JITFunction)
