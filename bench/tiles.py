"""Times our attention kernel with other tiles than those in use (``attention.tuning``), on a GPU.

    python -m bench.tiles [--batch 1 8 32] [--context 1024 8192] [--results DIR]
    python -m bench.tiles --smoke                  # tiny, in Triton's interpreter: no conclusions

All candidates are compiled first, side by side, and compared with the definition. One that does
not fit the GPU's shared memory, or computes something else, is named and left out. Then they are
timed, as by ``bench.kernels``: ``faster`` is the time of the tiles in use over its own. Writes
``tiles_DEVICE.csv``; an implementation's name is block_m x block_n, warps, stages, and the least
keys of a part.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from unittest import mock

import torch
from torch import Tensor

from bench.context import Row, command_line, publish, reporting_failures
from bench.kernels import CANVAS, DRAFTER, FULL, SLIDING, Case, Layer, attention_case, measure
from dllm.attention.tuning import TileConfig

DRAFTS = 16  # rows of a drafter's block
LAYERS = (SLIDING, FULL, DRAFTER)


def candidates(layer: Layer) -> dict[str, TileConfig]:
    """Tiles that may be faster for a layer, by name."""
    shapes = {
        SLIDING: [(128, 32, 8, 4), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)],
        FULL: [(128, 16, 8, 4), (64, 16, 4, 4), (64, 32, 4, 3), (128, 32, 8, 2)],
        DRAFTER: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3)],
    }[layer]
    parts = {SLIDING: (320, 640), FULL: (512, 2048), DRAFTER: (256, 1024)}[layer]
    most = 16 if layer is DRAFTER else 8
    found = [
        TileConfig(*shape, min_keys_per_split=keys, min_keys_in_window=keys, max_splits=most)
        for shape in shapes
        for keys in parts
    ]
    return {name_of(layer, config): config for config in found}


def name_of(layer: Layer, config: TileConfig) -> str:
    """One word for a candidate."""
    sizes = f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"
    return f"{sizes} k{config.keys_per_split(layer.window)}"


def with_tiles(case: Case, tiles: Mapping[str, TileConfig]) -> Case:
    """Our kernel alone, as it is ("in use"), and with these tiles."""
    from dllm.attention import canvas_attention

    ours = case.runs["dllm"]

    def run(config: TileConfig) -> Tensor:
        with mock.patch.object(canvas_attention, "tile_config", lambda *_: config):
            out: Tensor = ours()
        return out

    runs: dict[str, Callable[[], Tensor]] = {"in use": ours}
    runs |= {name: functools.partial(run, config) for name, config in tiles.items()}
    return case._replace(runs=runs)


def check(layer: Layer, name: str) -> str:
    """Compile one candidate and run it once on the GPU; what is wrong, or nothing."""
    case = attention_case(layer, 1, 1024, rows_of(layer), torch.bfloat16, "cuda")
    try:
        return case.problem(case.expected(), with_tiles(case, candidates(layer)).runs[name]())
    except Exception as error:  # a compiler's errors have no common class
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def why_not(layer: Layer, name: str) -> str:
    """``check`` in a process of its own, which may end."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(check, layer, name).result()
        except BrokenProcessPool:
            return "its process ended"


def fitting() -> dict[Layer, dict[str, TileConfig]]:
    """The candidates of each layer that this GPU runs; Triton's cache has their kernels then."""
    all_of = [(layer, name) for layer in LAYERS for name in candidates(layer)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        reasons = list(pool.map(why_not, *zip(*all_of, strict=True)))
    found: dict[Layer, dict[str, TileConfig]] = {layer: {} for layer in LAYERS}
    for (layer, name), reason in zip(all_of, reasons, strict=True):
        if reason:
            print(f"{layer.name} {name}: {reason}", flush=True)
        else:
            found[layer][name] = candidates(layer)[name]
    return found


def rows_of(layer: Layer) -> int:
    """Rows of a sequence."""
    return DRAFTS if layer is DRAFTER else CANVAS


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print and write every shape."""
    parser = command_line(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no conclusions")
    options = parser.parse_args(arguments)
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", list[Row]()
    if device == "cpu" and not options.smoke:
        parser.error("there is no GPU; allowed: --smoke.")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    if options.smoke:
        small = Layer("full", 4, 2, 32)
        tiles = {"16x32": TileConfig(16, 32, 4, 1, min_keys_per_split=32)}
        shapes = [(2, 48, 8, small, tiles, torch.float32)]
    else:
        fit = fitting()
        shapes = [
            (batch, context, rows_of(layer), layer, fit[layer], torch.bfloat16)
            for context in options.context
            for batch in options.batch
            for layer in LAYERS
        ]
    for batch, context, width, layer, tiles, dtype in shapes:
        case = attention_case(layer, batch, context, width, dtype, device)
        for row in measure(with_tiles(case, tiles), 1 if options.smoke else options.rounds, device):
            print(*row.values(), flush=True)
            rows.append(row)
        publish(options.results / f"tiles_{device}.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
