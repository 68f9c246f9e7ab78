"""What the compiler makes of the attention kernel's tiles, for the layers of the 26B model.

    python -m bench.tiles                     # all GPUs, bench/results/tiles.csv
    python -m bench.tiles --gpus 90 --results DIR

No GPU is needed: every candidate is compiled and assembled for each GPU (`bench.kernels`). Nothing
runs, so nothing here is a time. What can be known is whether a tile fits, what it keeps in flight,
and how many programs it makes of one request; whether it is fast is for `bench.attention`.

    registers, spilled   of a thread; bytes of a thread that did not fit into its registers
    shared_kib           of a program
    programs_of_sm       that a multiprocessor runs at a time
    keys_ahead           keys whose loads are still under way while others are computed with
    loads                load instructions of global memory in the program text
    programs             of one request that denoises 256 tokens behind 8,192
    unsplit              the same, if its keys were not split

The committed tiles (`attention/tuning.py`) are the best by `preference`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.attention_shapes import CANVAS, FULL, SYMMETRIC, Layer, Shape, make_inputs
from bench.context import RESULTS, provenance, read_csv, write_csv
from bench.multiprocessor import GPUS, NAMES, SMS, programs_of_sm
from bench.tables import markdown, measured_with
from dllm.attention.planning import BatchShape, num_splits, plan_attention
from dllm.attention.tuning import TileConfig, tile_config

if TYPE_CHECKING:
    from bench.kernels import Compiled

LAYERS = {"sliding": SYMMETRIC, "full": FULL}
CONTEXT = 8192
# (block_m, block_n, warps, stages, block_v); the committed tiles are always among them.
Tile = tuple[int, int, int, int, int]
WIDE: dict[str, tuple[Tile, ...]] = {
    "sliding": (
        (128, 64, 8, 2, 256), (128, 32, 8, 2, 256), (128, 32, 8, 3, 256), (128, 32, 8, 4, 256),
        (64, 32, 4, 2, 256), (64, 32, 4, 3, 256), (64, 16, 4, 4, 256),
    ),
    "full": (
        (128, 32, 8, 2, 256), (128, 16, 8, 3, 256), (128, 16, 8, 4, 256), (64, 32, 4, 2, 256),
        (64, 16, 4, 4, 256), (64, 32, 8, 2, 512),
    ),
}  # fmt: skip
CANDIDATES: dict[int, dict[str, tuple[Tile, ...]]] = {
    80: {
        "sliding": (
            (128, 32, 8, 3, 256), (64, 32, 4, 1, 256), (64, 32, 4, 3, 256), (64, 32, 8, 3, 256),
        ),
        "full": (
            (64, 32, 8, 2, 256), (64, 16, 4, 3, 256), (64, 16, 8, 3, 256), (32, 16, 4, 3, 256),
        ),
    },
    90: WIDE,
    100: {
        "sliding": (
            (128, 32, 8, 3, 256), (128, 32, 8, 3, 128), (64, 32, 8, 3, 256), (64, 32, 4, 3, 128),
        ),
        "full": ((128, 16, 8, 3, 256), (128, 16, 8, 3, 128), (64, 32, 8, 3, 128)),
    },
    120: {
        "sliding": (
            (64, 32, 4, 1, 256), (64, 16, 4, 3, 256), (64, 16, 8, 3, 256), (32, 32, 4, 2, 256),
        ),
        "full": (
            (32, 32, 4, 1, 256), (32, 16, 4, 3, 256), (32, 16, 8, 3, 256), (16, 16, 4, 3, 256),
        ),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A line of the CSV; units as in the heading of this file."""

    gpu: int
    layer: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_v: int
    page_size: int
    registers: int
    spilled: int
    shared_kib: int
    programs_of_sm: int
    matrix: str
    keys_ahead: int
    loads: int
    programs: int
    unsplit: int
    is_committed: bool


def preference(row: Result) -> tuple[int, ...]:
    """The higher, the better; in this order.

    No spilled registers. Loads that overlap with computing. Many rows on a multiprocessor, in few
    programs, because every key that is read serves all rows of its program. Few programs that share
    a head's columns, because each computes the logits again. Many keys ahead. Few registers.
    """
    return (
        int(row.programs_of_sm > 0),
        -row.spilled,
        int(row.keys_ahead > 0),
        row.block_m * row.programs_of_sm,
        row.block_m,
        row.block_v,
        row.keys_ahead,
        -row.registers,
    )


def committed(gpu: int, layer: Layer) -> TileConfig:
    """The tiles that a server takes on this GPU."""
    return tile_config(layer.head_size, 2, gpu)


def compiled(gpu: int, layer: Layer, tiles: TileConfig, page_size: int) -> Compiled:
    """The kernel as a denoise step of one request launches it."""
    from bench.kernels import recorded
    from dllm.attention.canvas_attention import batch_shape, canvas_attention  # needs Triton

    layer = replace(layer, page_size=page_size)
    inputs = make_inputs(Shape(layer, "denoise", 1, CONTEXT, CANVAS, (0,)), "meta")
    shape = batch_shape(inputs.query, inputs.cache, inputs.batch)
    plan = plan_attention(shape, tiles, inputs.options.window)
    with recorded() as launches:
        out = torch.empty_like(inputs.query)
        canvas_attention(inputs.query, inputs.cache, inputs.batch, inputs.options, out, plan)
    return launches[0].compiled(gpu)


def measure(gpu: int, name: str, tiles: TileConfig, page_size: int) -> Result:
    """One line."""
    layer = LAYERS[name]
    found = compiled(gpu, layer, tiles, page_size)
    shape = BatchShape(
        CANVAS, 1, layer.num_heads, layer.num_kv_heads, layer.head_size, CANVAS, CONTEXT + CANVAS
    )
    columns = -(-layer.head_size // tiles.columns(layer.head_size))
    unsplit = -(-CANVAS * shape.group // tiles.block_m) * layer.num_kv_heads * columns
    parts = num_splits(CANVAS, CONTEXT + CANVAS, shape, tiles, layer.window)
    ours = committed(gpu, layer)
    return Result(
        gpu=gpu, layer=name, block_m=tiles.block_m, block_n=tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        block_v=tiles.columns(layer.head_size), page_size=page_size, registers=found.registers,
        spilled=found.spilled, shared_kib=-(-found.shared // 1024),
        programs_of_sm=programs_of_sm(gpu, found.registers, found.shared, found.num_warps),
        matrix=found.matrix,
        # A tile's K and V are two groups of loads.
        keys_ahead=min(found.waits, default=0) // 2 * tiles.block_n,
        loads=found.loads, programs=unsplit * parts, unsplit=unsplit, is_committed=tiles == ours,
    )  # fmt: skip


def candidates(gpu: int, name: str) -> list[TileConfig]:
    """The committed tiles, and those of the list above with the same rules of splitting."""
    ours = committed(gpu, LAYERS[name])
    others = [
        replace(ours, block_m=m, block_n=n, num_warps=warps, num_stages=stages, block_v=v)
        for m, n, warps, stages, v in CANDIDATES[gpu][name]
    ]
    return list(dict.fromkeys([ours, *others]))


def tiles(results: Path) -> str:
    """Section of docs/benchmarks.md: what the compiler says about the committed tiles."""
    rows = read_csv(results / "tiles.csv")
    if not rows:
        return "Not computed yet: `python -m bench.tiles`."
    header = [
        "GPU", "layers", "rows x keys (columns), warps, stages", "page", "registers", "spilled, B",
        "shared, KiB", "programs of an SM", "matrix", "keys ahead", "loads",
        "programs of a request, of SMs",
    ]  # fmt: skip
    table = markdown((header, [_line(row) for row in rows if row["is_committed"] == "True"]))
    return f"{table}\n\n{measured_with(rows, 'tiles.csv')}"


def _line(row: dict[str, str]) -> list[str]:
    gpu = int(row["gpu"])
    tile = (
        f"{row['block_m']} x {row['block_n']} ({row['block_v']}), {row['num_warps']}, "
        f"{row['num_stages']}"
    )
    is_split = row["programs"] != row["unsplit"]
    unsplit = f" ({row['unsplit']} unsplit)" if is_split else ""
    return [
        NAMES[gpu],
        row["layer"],
        tile,
        row["page_size"],
        row["registers"],
        row["spilled"],
        row["shared_kib"],
        row["programs_of_sm"],
        row["matrix"],
        row["keys_ahead"],
        row["loads"],
        f"{row['programs']}{unsplit}, {SMS[gpu]}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and write the CSV, after every line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    given = parser.parse_args(arguments)
    found: list[Result] = []
    origin = provenance("bench.tiles")
    for gpu in given.gpus:
        for name in given.layers:
            ours = committed(gpu, LAYERS[name])
            pages = [(one, 64) for one in candidates(gpu, name)] + [(ours, 16)]
            for one, page_size in pages:
                found.append(measure(gpu, name, one, page_size))
                print(found[-1], flush=True)
                write_csv(given.results / "tiles.csv", [asdict(one) | origin for one in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
