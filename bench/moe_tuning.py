"""A table of tiles for vLLM's fused mixture-of-experts kernel, for the experts of the 26B model.

    python -m bench.moe_tuning --weights bf16 fp8 --seconds 50      # for each of them
    VLLM_TUNED_CONFIG_FOLDER=DIR vllm serve ...                     # takes the table
    python -m bench.moe_tuning --tables-of moe.csv --results DIR    # tables, where only it was kept
    python -m bench.moe_tuning --smoke                              # tiny experts, no GPU

vLLM 0.32 has no table for 128 experts of width 704 on an H200. Tried are, for every batch that
occurs (canvases of 256 tokens, each with 8 experts): vLLM's own choice without a table, what tables
of the same experts for other GPUs say, and then tiles in random order until the time is over. A
change of tiles changes a rounding at most, so each result is compared with that of vLLM's choice;
what differs by more is left out. Written to --results after every tile: a JSON file for each kind
of weights, named as vLLM looks for it, and moe.csv with the best and vLLM's choice for each batch.

On Hopper vLLM serves bf16 experts with this kernel, and FP8 experts with CUTLASS unless it is given
``--moe-backend triton``: the FP8 table counts only then.

Without a GPU --smoke searches in the same way, with plain products in the place of the kernel,
which do not look at the tiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.context import RESULTS, provenance, read_csv, write_csv
from bench.roofline import released_config

Tiles = dict[str, int]  # BLOCK_SIZE_M, ..., as vLLM's tables have them
Run = Callable[[Tiles | None], Tensor]  # the kernel with these tiles, or with vLLM's choice

BATCHES = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a pass: 1 to 32 canvases
SMOKE_BATCHES = (8, 16)
WEIGHTS = {"bf16": None, "fp8": "fp8_w8a8"}  # and vLLM's word for them in a table's name
OTHER_GPUS = ("NVIDIA_H100_80GB_HBM3", "NVIDIA_B200")
SHARED_BYTES = 227 << 10  # of a program on Hopper
DIFFERENCE = 2e-2  # of the largest number: products rounded to bf16, twice


@dataclass(frozen=True)
class Experts:
    """Sizes of a layer of experts."""

    count: int
    chosen: int
    width: int
    hidden: int

    @classmethod
    def of(cls, text: dict[str, Any]) -> Experts:
        """From a text_config."""
        names = ("num_experts", "top_k_experts", "moe_intermediate_size", "hidden_size")
        return cls(*(text[name] for name in names))


SMOKE = Experts(4, 2, 32, 48)


@dataclass
class Found:
    """The best tiles of a batch so far, and vLLM's choice; milliseconds."""

    default_ms: float
    ms: float
    tiles: Tiles | None = None
    tried: int = 0
    refused: int = 0  # did not compile, or computed something else


# --- what is tried -------------------------------------------------------------------------------


def grid(element_size: int, seed: int = 0) -> list[Tiles]:
    """Every combination that fits into shared memory and registers, in random order."""
    axes = ((16, 32, 64, 128), (64, 128, 256), (64, 128, 256), (1, 16), (4, 8), (2, 3, 4, 5))
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps")
    tiles = [dict(zip((*names, "num_stages"), one, strict=True)) for one in product(*axes)]
    kept = [one for one in tiles if fits(one, element_size)]
    random.Random(seed).shuffle(kept)
    return kept


def fits(tiles: Tiles, element_size: int) -> bool:
    """Whether operands of all stages fit into shared memory, and sums into half the registers."""
    rows, columns, inner, warps = (
        tiles[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
    )
    shared = tiles["num_stages"] * (rows + columns) * inner * element_size
    return shared <= SHARED_BYTES and rows * columns <= 128 * 32 * warps


def tables_of_other_gpus(experts: Experts, dtype: str | None) -> list[Tiles]:
    """Every entry of vLLM's tables of the same experts for other GPUs, each once."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    kind = f",dtype={dtype}" if dtype else ""
    folder = Path(fused_moe.__file__).parent / "configs"
    found: list[Tiles] = []
    for gpu in OTHER_GPUS:
        path = folder / f"E={experts.count},N={experts.width},device_name={gpu}{kind}.json"
        if path.exists():
            table = json.loads(path.read_text())
            table.pop("triton_version", None)
            found += [tiles for tiles in table.values() if tiles not in found]
    return found


# --- search --------------------------------------------------------------------------------------


@dataclass
class Search:
    """Tries tiles on all batches until a time is over.

    Attributes:
        runs: for every batch, the kernel.
        measure: milliseconds of a call.
    """

    runs: dict[int, Run]
    measure: Callable[[Callable[[], object]], float]
    found: dict[int, Found] = field(default_factory=dict)

    def go(self, tiles: Sequence[Tiles], deadline: float) -> Iterator[None]:
        """Try one tile after the other; yields after each, and after vLLM's choices."""
        expected = {}
        for batch, run in self.runs.items():
            expected[batch] = run(None)
            ms = self.measure(lambda run=run: run(None))  # type: ignore[misc]
            self.found[batch] = Found(ms, ms)
        yield
        for one in tiles:
            if time.monotonic() > deadline:
                return
            for batch in self.runs:
                self._try(one, batch, expected[batch])
            yield

    def _try(self, tiles: Tiles, batch: int, expected: Tensor) -> None:
        found, run = self.found[batch], self.runs[batch]
        try:
            is_right = difference(run(tiles), expected) <= DIFFERENCE
            ms = self.measure(lambda: run(tiles)) if is_right else float("inf")
        except Exception as error:  # Triton: out of resources, or it cannot compile them
            if "CUDA error" in str(error):
                raise  # nothing that comes after it can be believed
            is_right, ms = False, float("inf")
        found.tried += 1
        found.refused += not is_right
        if ms < found.ms:
            found.ms, found.tiles = ms, tiles


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest number; infinity for NaN."""
    gap = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    return gap if gap == gap else float("inf")


# --- the kernel ----------------------------------------------------------------------------------


def kernel(experts: Experts, weights: str, batch: int, device: str = "cuda") -> Run:
    """vLLM's fused experts on random numbers; router scores choose experts evenly."""
    from vllm.model_executor.layers.fused_moe import MoEActivation, override_config
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    torch.manual_seed(0)
    shapes = (2 * experts.width, experts.hidden), (experts.hidden, experts.width)
    (up, up_scale), (down, down_scale) = (
        random_weight((experts.count, *shape), weights, device) for shape in shapes
    )
    quantization = FUSED_MOE_UNQUANTIZED_CONFIG
    if weights == "fp8":
        quantization = fp8_w8a8_moe_quant_config(
            up_scale, down_scale, per_act_token_quant=True, per_out_ch_quant=True
        )
    x = torch.randn(batch, experts.hidden, device=device, dtype=torch.bfloat16)
    scores = torch.rand(batch, experts.count, device=device).topk(experts.chosen)
    share, ids = scores.values / scores.values.sum(-1, keepdim=True), scores.indices.int()

    def run(tiles: Tiles | None) -> Tensor:
        with override_config(tiles):
            result: Tensor = fused_experts(
                x, up, down, share, ids, MoEActivation.GELU_TANH, quant_config=quantization
            )
            return result

    return run


def random_weight(shape: tuple[int, int, int], weights: str, device: str) -> tuple[Tensor, Tensor]:
    """[E, out, in] in bf16 or FP8, and a scale [E, out, 1] that makes products of size 1."""
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
    scale = torch.full((*shape[:2], 1), shape[2] ** -0.5, device=device)
    if weights == "fp8":
        return weight.to(torch.float8_e4m3fn), scale
    return weight * shape[2] ** -0.5, scale


def stand_in(experts: Experts, batch: int) -> Run:
    """Plain products of about the same work; they take every tile for the same."""
    torch.manual_seed(0)
    x = torch.randn(batch, experts.hidden)
    up = torch.randn(experts.count, experts.hidden, experts.width)

    def run(tiles: Tiles | None) -> Tensor:
        return (x @ up).relu().sum(0)

    return run


def median_ms(call: Callable[[], object]) -> float:
    """Of a call on a GPU, with a cold L2: 25 ms of them are enough to rank tiles."""
    from triton.testing import do_bench

    timed: float = do_bench(call, warmup=5, rep=25, return_mode="median")
    return timed


def wall_ms(call: Callable[[], object]) -> float:
    """Median of three calls on a CPU."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


# --- output --------------------------------------------------------------------------------------


def table_name(experts: Experts, dtype: str | None) -> str:
    """The file that vLLM looks for on this device."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    name: str = get_config_file_name(experts.count, experts.width, dtype)
    return name


def write_tables(rows: Sequence[Mapping[str, object]], folder: Path) -> None:
    """The best tiles of each batch in vLLM's format, a file for each kind of weights.

    Args:
        rows: of moe.csv.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(str(row["table"]) for row in rows):
        mine = [row for row in rows if row["table"] == name]
        table = {str(row["tokens"]): json.loads(str(row["tiles"])) for row in mine}
        (folder / name).write_text(json.dumps(table, indent=4) + "\n")


def default_tiles(experts: Experts, batch: int, dtype: str | None) -> Tiles:
    """What vLLM takes without a table."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config

    sizes = (batch, experts.count, experts.width, experts.hidden, experts.chosen)
    tiles: Tiles = get_default_config(*sizes, dtype)
    # "SPLIT_K" is of another kernel: tables do not have it.
    return {name: value for name, value in tiles.items() if name != "SPLIT_K"}


def tune(
    experts: Experts, weights: str, batches: Sequence[int], seconds: float
) -> Iterator[list[dict[str, object]]]:
    """Search; the rows so far, after every tile."""
    dtype, deadline = WEIGHTS[weights], time.monotonic() + seconds
    is_kernel = torch.cuda.is_available()
    runs = {
        batch: kernel(experts, weights, batch) if is_kernel else stand_in(experts, batch)
        for batch in batches
    }
    tiles = tables_of_other_gpus(experts, dtype)
    tiles += [one for one in grid(1 if weights == "fp8" else 2) if one not in tiles]
    defaults = {batch: default_tiles(experts, batch, dtype) for batch in batches}
    search = Search(runs, median_ms if is_kernel else wall_ms)
    for _ in search.go(tiles, deadline):
        yield [
            {
                "weights": weights,
                "tokens": batch,
                "default_ms": one.default_ms,
                "best_ms": one.ms,
                "tried": one.tried,
                "refused": one.refused,
                "tiles": json.dumps(one.tiles or defaults[batch]),
                "table": table_name(experts, dtype),
            }
            for batch, one in search.found.items()
        ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--seconds", type=float, default=50.0, help="for each kind of weights")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no conclusions")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="folder of the files")
    parser.add_argument("--tables-of", type=Path, metavar="CSV", help="only write tables from it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for each kind of weights, print the best, write tables and CSV."""
    options = parse(arguments)
    if options.tables_of:
        write_tables(read_csv(options.tables_of), options.results)
        return 0
    if not options.smoke and not torch.cuda.is_available():
        print("There is no GPU: --smoke tests the plumbing; nothing else runs.", file=sys.stderr)
        return 2
    experts = SMOKE if options.smoke else Experts.of(released_config()["text_config"])
    batches = SMOKE_BATCHES if options.smoke else BATCHES
    shared = provenance("bench.moe_tuning")
    rows: list[dict[str, object]] = []
    for weights in options.weights:
        new: list[dict[str, object]] = []
        for new in tune(experts, weights, batches, options.seconds):
            write_csv(options.results / "moe.csv", [row | shared for row in rows + new])
            write_tables(rows + new, options.results)
        for row in new:
            line = "{weights} {tokens:5} tokens: {default_ms:.3f} -> {best_ms:.3f} ms  {tiles}"
            print(line.format_map(row), flush=True)
        rows += new
    return 0


if __name__ == "__main__":
    sys.exit(main())
