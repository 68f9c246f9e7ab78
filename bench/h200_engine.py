"""Ours and the built-in on one GPU, dummy weights of the released shape; a part of `bench.h200`.

    python -m bench.h200_engine --weights fp8
    python -m bench.h200_engine --weights bf16 --toy       # tiny-random's shape, any device

Both engines are up at once and do the same work in turn. The CSV is written after every pair:

    component "pass"    ms_per_step: wall time of the work without a profiler / passes, prefill and
                        all; tokens_per_s of the same. Medians of the pairs.
    other components    of denoise-only steps under the profiler, in the first pair
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.context import RESULTS, provenance, write_csv
from bench.profile_engine import BUILTIN, OURS, EngineProcess, Job
from bench.profile_step import Breakdown, steps_of
from bench.released import released_config, write_without_weights
from dllm.models.gemma.tiny import tiny_config

BATCHES, TOY_BATCHES = (1, 8, 32), (1, 2)
BUILTIN_MAX_REQS = 8  # vLLM's choice for its own class: more run out of memory on an H200
FIXED_STEPS = 16
CACHE_BYTES, TOY_CACHE_BYTES = 10 << 30, 64 << 20
COVERAGE = 0.8  # of the client's time by the trace: torch.profiler starts and ends inside it


def job(server: str, options: argparse.Namespace, folder: Path) -> Job:
    """What one engine does."""
    is_toy, has_gpu = options.toy, torch.cuda.is_available()
    model = write_without_weights(
        folder / server,
        tiny_config() if is_toy else released_config(),
        is_fp8=options.weights == "fp8",
        image_processor=has_gpu and server == BUILTIN,
    )
    batches = TOY_BATCHES if is_toy else BATCHES
    most = max(batches)
    llm: dict[str, object] = {
        "load_format": "dummy",
        "kv_cache_memory_bytes": TOY_CACHE_BYTES if is_toy else CACHE_BYTES,
    }
    if has_gpu:
        llm["gpu_memory_utilization"] = 0.45  # two engines share the GPU
    return Job(
        model=str(model),
        folder=str(folder),
        server=server,
        mode="eager" if is_toy else "compiled",
        max_num_seqs=min(most, BUILTIN_MAX_REQS) if server == BUILTIN else most,
        steps=FIXED_STEPS,
        blocks=2,
        input_len=64 if is_toy else 1024,
        profiler="torch" if has_gpu else "clock",
        options=llm,
    )


@dataclass
class Measured:
    """One server and batch.

    Attributes:
        speeds: tokens/s of each pair, without the profiler.
        passes_ms: of each pair, wall time / passes.
        breakdown: of the first pair.
    """

    job: Job
    batch: int
    speeds: list[float] = field(default_factory=list)
    passes_ms: list[float] = field(default_factory=list)
    breakdown: Breakdown | None = None

    def add(self, engine: EngineProcess) -> None:
        """One more pair.

        Raises:
            RuntimeError, ValueError: the engine failed, or its trace does not fit what was seen.
        """
        index, running = len(self.speeds), min(self.batch, self.job.max_num_seqs)
        taken = engine.do(self.batch, index, is_profiled=index == 0)
        waves = -(-self.batch // running)
        passes = self.job.blocks * (self.job.steps + (self.job.server == BUILTIN)) * waves
        self.speeds.append(1e3 * taken.tokens / taken.plain_wall_ms)
        self.passes_ms.append(taken.plain_wall_ms / passes)
        if index == 0:
            self.breakdown = Breakdown.of(steps_of(taken, running, COVERAGE))

    def rows(self) -> list[dict[str, object]]:
        """The pass, then its components."""
        row = {"server": self.job.server, "batch": self.batch}
        assert self.breakdown is not None
        whole: dict[str, object] = dict.fromkeys(self.breakdown.rows()[0])
        whole |= {"component": "pass", "ms_per_step": statistics.median(self.passes_ms)}
        whole |= {"low_ms": min(self.passes_ms), "high_ms": max(self.passes_ms), "share": 1.0}
        return [
            row | whole | {"tokens_per_s": statistics.median(self.speeds)},
            *(row | one | {"tokens_per_s": None} for one in self.breakdown.rows()),
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Alternate, and write the CSV after every pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=("fp8", "bf16"), required=True)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="a tiny shape, on any device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    shared: dict[str, object] = {"weights": options.weights}
    shared |= {"model": "toy" if options.toy else "released", **provenance("bench.h200_engine")}
    if torch.cuda.is_available():
        shared["machine"] = torch.cuda.get_device_name()
    path = options.results / f"h200_engine_{options.weights}.csv"
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="dllm-h200-") as folder, ExitStack() as stack:
        some = [job(server, options, Path(folder)) for server in (OURS, BUILTIN)]
        engines = [stack.enter_context(EngineProcess(one)) for one in some]
        for engine in engines:
            print(f"{engine.job.server}: ready in {engine.wait_until_ready():.0f} s", flush=True)
        for batch in TOY_BATCHES if options.toy else BATCHES:
            pairs = [(Measured(engine.job, batch), engine) for engine in engines]
            measured += [one for one, _ in pairs]
            for index in range(options.pairs):
                for one, engine in pairs if index % 2 == 0 else pairs[::-1]:
                    one.add(engine)
                write_csv(path, [row | shared for one in measured for row in one.rows()])
            for one, _ in pairs:
                speed = statistics.median(one.speeds)
                print(f"batch {batch}, {one.job.server}: {speed:.1f} tokens/s", flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its engines are to end with it
    sys.exit(main())
