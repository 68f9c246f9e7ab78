"""`tile_product` in Triton: soft embeddings that skip tiles of the vocabulary without mass.

    order     rows by entropy, the least certain first; ROWS of them are a group. Rows without a
              distribution come last: nothing is read of them, nor multiplied
    probs     a program for BLOCK tokens of one row: its probabilities, 0 in tiles that the row
              leaves out, and a mark at each other tile of its group. By the row's statistics most
              blocks of a sure row are left out whole: of these no logit is read
    list      the marked tiles of each group (`tile_product.tiles_of_groups`)
    product   a program for COLUMNS columns of a group and a part of the group's list; the sum over
              the parts is the result

How many tiles a group has is read on the device: the host waits for nothing. Neighbouring programs
are of different groups and the same columns, so that they read the same embeddings at the same
time. Where every tile has mass, less than 3 % of the bytes are added to those of a dense product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from dllm.attention.online_softmax import dot
from dllm.ops.row_stats import RowStats, tile_width
from dllm.ops.row_stats_gpu import OF_ROWS, softcapped
from dllm.ops.soft_embedding import Shard
from dllm.ops.tile_product import TILE, least_mass, tiles_of_groups

MOST_PARTS = 8


@dataclass(frozen=True)
class ProductTiles:
    """How the kernels cut the product; powers of two. No result depends on it but by rounding."""

    rows: int = 128  # of the result, of a program
    columns: int = 256  # likewise
    stages: int = 4  # tiles of the vocabulary that are on their way at a time
    num_warps: int = 8
    block: int = 2048  # tokens whose probabilities a program computes


# By bytes of an embedding's number. Others than Hopper's have a table whose tiles fit the 99 KiB of
# shared memory of the smallest cards; the large ones spill on a B200.
HOPPER: dict[int, ProductTiles] = {2: ProductTiles(), 4: ProductTiles(64, 64, stages=2)}
OTHERS: dict[int, ProductTiles] = {2: ProductTiles(columns=128, stages=3), 4: HOPPER[4]}


def product_tiles(element_size: int, arch: int) -> ProductTiles:
    """For embeddings of 2 or 4 bytes; arch: compute capability, for instance 90."""
    return (HOPPER if arch == 90 else OTHERS)[element_size]


def num_parts(num_programs: int, num_sms: int) -> int:
    """The fewest with which the last wave of programs, one on each multiprocessor, fills nine
    tenths of the GPU, or `MOST_PARTS`. num_programs: with one part.
    """
    for parts in range(1, MOST_PARTS):
        waves = num_programs * parts / num_sms
        if waves >= 0.9 * -(-waves // 1):
            return parts
    return MOST_PARTS


def tile_product_kernels(
    logits: Tensor,
    temperature: Tensor,
    stats: RowStats,
    shard: Shard,
    budget: float,
    cut: ProductTiles,
    num_sms: int = 132,
    cap: float | None = None,
) -> Tensor:
    """As `tile_product`; a sum of fp32 products in another order. cap: as of `row_stats`."""
    (num_rows, vocab_size), hidden = logits.shape, shard.weight.shape[1]
    if num_rows == 0:
        return shard.weight.new_zeros(0, hidden)
    assert logits.stride(1) == 1 and shard.weight.stride(1) == 1
    # The tiles of the whole vocabulary that the shard has tokens of, and those in front of them in
    # the same tile of the statistics.
    width = tile_width(vocab_size)
    first, last = shard.start // max(width, TILE) * max(width // TILE, 1), -(-shard.end // TILE)
    assert cut.block % width == 0, (cut, width)
    entropy = stats.entropy
    order = torch.where(entropy.isinf(), -1.0, entropy).argsort(descending=True)
    groups, num_tiles = triton.cdiv(num_rows, cut.rows), last - first
    probs = logits.new_empty(num_rows, num_tiles * TILE, dtype=shard.weight.dtype)
    is_used = torch.zeros(groups, num_tiles, dtype=torch.int8, device=logits.device)
    _heavy_kernel[(num_rows, triton.cdiv(num_tiles * TILE, cut.block))](
        logits, logits.stride(0), temperature, stats.peak, stats.log_z, stats.cutoff,
        stats.tile_mass, order, probs, is_used, least_mass(vocab_size, budget), first, vocab_size,
        num_tiles, stats.tile_mass.stride(0), ROWS=cut.rows, TILE=TILE, TILES=cut.block // TILE,
        WIDTH=width, CAP=cap or 0.0, num_warps=cut.num_warps,
    )  # fmt: skip
    tiles, counts = tiles_of_groups(is_used)
    columns = triton.cdiv(hidden, cut.columns)
    parts = num_parts(groups * columns, num_sms)
    partial = torch.empty(parts, num_rows, hidden, dtype=torch.float32, device=logits.device)
    _product_kernel[(groups, columns, parts)](
        probs, tiles, counts, order, shard.weight, shard.weight.stride(0), partial,
        first * TILE - shard.start, shard.end - shard.start, num_rows, num_tiles, hidden,
        ROWS=cut.rows, COLUMNS=cut.columns, TILE=TILE,
        IS_EVEN=shard.start == first * TILE and shard.end % TILE == 0,
        UPCAST=probs.dtype == torch.bfloat16 and knobs.runtime.interpret,
        num_warps=cut.num_warps, num_stages=cut.stages,
    )  # fmt: skip
    return partial.sum(dim=0).to(shard.weight.dtype)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=OF_ROWS)
def _heavy_kernel(
    logits, row_stride, temperature, peak, log_z, cutoff, tile_mass, order, probs, is_used, light,
    first, vocab_size, num_tiles, num_masses,
    ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """The probabilities of TILES tiles of one row, without those of at most `light`.

    first: the shard's first tile, the tiles here count from. tile_mass: the probabilities of the
    row's `num_masses` tiles of WIDTH tokens; 0 in a row without a distribution.
    """
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(order + place)
    tile = block * TILES + tl.arange(0, TILES)
    inside = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]  # [TILES, TILE]
    is_tile = tile < num_tiles
    masses: tl.constexpr = TILES * TILE // WIDTH
    wide = first * TILE // WIDTH + block * masses
    of_block = 0.0
    for _ in tl.static_range(masses):
        of_block += tl.load(tile_mass + row * num_masses + wide, mask=wide < num_masses, other=0.0)
        wide += 1
    p = tl.zeros((TILES, TILE), tl.float32)
    if of_block > light:  # else no tile of the block is heavy, and nothing is read
        ids = first * TILE + inside
        is_token = is_tile[:, None] & (ids < vocab_size)
        x = softcapped(tl.load(logits + row * row_stride + ids, mask=is_token, other=0.0), CAP)
        # In powers of 2. 1 / T may overflow to inf, and inf * 0 is NaN at the peak: limited.
        factor = tl.minimum(1.4426950408889634 / tl.load(temperature + row), 3e38)
        log_of_z = 1.4426950408889634 * tl.load(log_z + row)
        p = tl.exp2((x - tl.load(peak + row)) * factor - log_of_z)
        p = tl.where(is_token & (x >= tl.load(cutoff + row)), p, 0.0)
        is_heavy = is_tile & (tl.sum(p, 1) > light)  # [TILES]
        p = tl.where(is_heavy[:, None], p, 0.0)
        # Programs of several rows may write here at once, and all write the same.
        tl.store(is_used + place // ROWS * num_tiles + tile, 1, mask=is_heavy)
    tl.store(
        probs + place * num_tiles * TILE + inside, p.to(probs.dtype.element_ty),
        mask=is_tile[:, None],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "offset"])
def _product_kernel(
    probs, tiles, counts, order, weight, weight_stride, partial,
    offset, num_tokens, num_rows, num_tiles, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Some columns of a group's rows, summed over a part of its tiles.

    offset: the first token of tile 0, counted from the shard's first of `num_tokens`. IS_EVEN: the
    shard has whole tiles. UPCAST: as of ``dot``.
    """
    group, part, parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    place = group * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.arange(0, TILE)
    # Rows behind the last one read that one's probabilities, and are not stored.
    of_row = tl.minimum(place, num_rows - 1).to(tl.int64) * num_tiles * TILE
    is_column = column < hidden
    count = tl.load(counts + group)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first, last = count * part // parts, count * (part + 1) // parts
    # The list is read one tile ahead. Otherwise the compiler would count the load of a tile's id
    # and those that need it as loads that wait for each other, and start none early.
    tiles += group * num_tiles
    tile = tl.load(tiles + first, mask=first < last, other=0)
    for index in range(first, last):
        place_of = tile * TILE + inside
        tile = tl.load(tiles + index + 1, mask=index + 1 < last, other=0)
        p = tl.load(probs + of_row[:, None] + place_of[None, :])
        token = offset + place_of
        mask = is_column[None, :]
        if not IS_EVEN:
            mask = mask & ((token >= 0) & (token < num_tokens))[:, None]
        w = tl.load(
            weight + token[:, None].to(tl.int64) * weight_stride + column[None, :], mask=mask,
            other=0.0,
        )  # fmt: skip
        total = dot(p, w, total, UPCAST)
    is_row = place < num_rows
    row = tl.load(order + place, mask=is_row, other=0) + part.to(tl.int64) * num_rows
    tl.store(
        partial + row[:, None] * hidden + column[None, :], total,
        mask=is_row[:, None] & is_column[None, :],
    )  # fmt: skip
