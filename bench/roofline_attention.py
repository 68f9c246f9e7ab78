"""How long our attention kernel should take, from its launch plan; part of ``bench.roofline``.

Only the multiprocessor with the most programs counts. They run one after the other, because the
shared memory holds one, at EFFICIENCY of its share of the card's large products. Where keys are
split, parts are written and read once more at the speed of a copy. EFFICIENCY is an assumption: no
time of a GPU is behind it.

Parts are cut by a sequence's own lengths, so that its bits do not depend on who shares the batch.
Smaller parts help where one canvas leaves multiprocessors idle, and cost memory traffic where many
canvases fill them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from bench.kernels import FULL, SYMMETRIC, Layer
from dllm.attention.planning import (
    BatchShape,
    ceil_div,
    num_splits,
    plan_attention,
    visible_keys,
)
from dllm.attention.tuning import TileConfig, tile_config

EFFICIENCY = 0.43
MULTIPROCESSORS = 132  # of an H100 or H200
BF16, FP32 = 2, 4  # bytes
LONGEST = 1 << 18  # of a server; plans are made for it


class Expected(NamedTuple):
    """One layer in one pass: into how many parts its keys are cut, the programs of the kernel, how
    many of them the busiest multiprocessor has, and microseconds: expected, and the floor."""

    parts: int
    programs: int
    of_busiest: int
    us: float
    floor_us: float


def expected(
    layer: Layer, batch: int, context: int, canvas: int, peaks: tuple[float, float],
    tiles: TileConfig,
) -> Expected:  # fmt: skip
    """``batch`` canvases, each behind as much context.

    Args:
        peaks: bytes of a copy, and 16-bit operations, a second.
    """
    copy, product = peaks
    shape = BatchShape(
        num_tokens=batch * canvas,
        num_seqs=batch,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        max_query_len=LONGEST,
        max_seq_len=LONGEST,
    )
    plan = plan_attention(shape, tiles, layer.window)
    length = context + canvas
    keys = visible_keys(canvas, length, layer.window)
    parts = num_splits(canvas, length, shape, tiles, layer.window)
    launched = min(parts, plan.split_programs)  # those that share the parts of a tile
    row_tiles = batch * ceil_div(canvas * shape.group, plan.block_m)
    programs = row_tiles * layer.num_kv_heads * plan.value_blocks * launched
    of_busiest = ceil_div(programs, MULTIPROCESSORS)
    keys_each = ceil_div(keys, parts) * ceil_div(parts, launched)
    operations = 2 * plan.block_m * keys_each * (layer.head_size + plan.block_v)
    seconds = of_busiest * operations / (EFFICIENCY * product / MULTIPROCESSORS)
    width = layer.num_heads * batch * canvas
    if parts > 1:
        seconds += 2 * parts * FP32 * width * (layer.head_size + 2) / copy
    moved = 2 * BF16 * layer.head_size * (width + batch * keys * layer.num_kv_heads)
    floor = max(moved / copy, 4 * width * layer.head_size * keys / product)
    return Expected(parts, programs, of_busiest, 1e6 * seconds, 1e6 * floor)


def report(canvas: int, peaks: tuple[float, float]) -> Iterator[str]:
    """Lines: both layers of the released model behind 1k and 8k, as planned and cut finer."""
    yield f"our attention, us a layer ({EFFICIENCY:.0%} of large products, an assumption):"
    yield (
        f"  {'':18} {'parts of':>9} {'batch':>6} {'context':>8} {'parts':>6} {'programs':>9} "
        f"{'an SM':>6} {'expected':>9} {'floor':>7}"
    )
    for layer, sizes in ((SYMMETRIC, (640, 427, 320)), (FULL, (2048, 640, 512))):
        planned = tile_config(layer.head_size, BF16)
        for size in sizes:
            finer = replace(planned, min_keys_per_split=size, min_keys_in_window=size)
            for batch, context in ((1, 1024), (1, 8192), (8, 1024), (32, 1024)):
                found = expected(layer, batch, context, canvas, peaks, finer)
                chosen = "*" if size == planned.keys_per_split(layer.window) else " "
                yield (
                    f"{chosen} {layer.name:18} {size:9} {batch:6} {context:8} {found.parts:6} "
                    f"{found.programs:9} {found.of_busiest:6} {found.us:9.1f} {found.floor_us:7.1f}"
                )
