"""How the time of a denoise step grows with concurrency, canvas, context and vocabulary.

    python -m bench.scaling                                # a CPU, eager, under 10 minutes
    python -m bench.scaling --axis canvas --rounds 9

Small checkpoints with random weights are served in this process, one engine for each canvas and
vocabulary, all alive at once. Every round measures every point once, in another order, so that a
machine that gets slower does so to all points alike; --budget-s ends the bench after a round that
exceeds it, if there are three. A point is --steps denoise steps of requests whose canvases never
converge; its value is their median.

Time is processor time of the one thread that does everything (OMP_NUM_THREADS is 1 here): on an
idle machine that is wall time, and on a busy one it is what wall time would be. `bench.step_ranges`
says what belongs to which component; `bench.growth` how exponents are fitted. "engine" is
everything that is not forward, head or sampler.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import step_ranges
from bench.context import RESULTS, progress, provenance, write_csv
from bench.growth import Growth, bends_at, fit
from bench.step_ranges import (
    GROUPS,
    LOG,
    Named,
    engine_functions,
    name_parts,
    worker_functions,
)
from bench.step_trace import Step, Trace

AXES: dict[str, tuple[int, ...]] = {
    "concurrency": (1, 2, 4, 8, 16, 32, 64),
    "canvas": (32, 64, 128, 256),
    "context": (128, 512, 1024, 2048, 4096, 8192),
    "vocabulary": (1024, 8192, 32_768, 131_072, 262_144),
}
# What a point has on the other axes.
BASE = {"concurrency": 1, "canvas": 32, "context": 128, "vocabulary": 1024}
SMOKE_AXES = {"concurrency": (1, 2), "canvas": (32, 64)}
MIN_ROUNDS = 3
COMPONENTS = ("step", "forward", "head", "sampler", "engine")
Times = dict[str, float]  # by component, ms


@dataclass(frozen=True)
class Point:
    """One value of an axis; the other axes as in `BASE`."""

    axis: str
    value: int

    def __getitem__(self, axis: str) -> int:
        return self.value if axis == self.axis else BASE[axis]

    @property
    def model(self) -> tuple[int, int]:
        """Which checkpoint: canvas and vocabulary."""
        return self["canvas"], self["vocabulary"]


def times_of(steps: Sequence[Step]) -> Times:
    """The median step and its components."""
    groups: list[Times] = []
    for step in steps:
        sums = dict.fromkeys(("engine", "forward", "head", "sampler", "idle"), 0.0)
        for part, milliseconds in step.parts_ms.items():
            sums[GROUPS[part]] += milliseconds
        sums["engine"] += sums.pop("idle")
        groups.append(sums | {"step": step.wall_ms})
    return {name: statistics.median(one[name] for one in groups) for name in COMPONENTS}


# --- engines -------------------------------------------------------------------------------------


class Engine:
    """An engine in this process whose requests denoise for ever."""

    def __init__(self, folder: Path, points: Sequence[Point]) -> None:
        """Write and serve the checkpoint that these points share."""
        from vllm import LLM

        from dllm.models.gemma.tiny import tiny_config, write_checkpoint

        canvas, vocabulary = points[0].model
        longest = max(point["context"] for point in points)
        config = tiny_config(
            canvas_length=canvas, vocab_size=vocabulary, max_position_embeddings=16_384
        )
        generation: dict[str, object] = {"max_denoising_steps": 10_000, "confidence_threshold": 0.0}
        path = write_checkpoint(folder, config, generation=generation)
        most = max(point["concurrency"] for point in points)
        self._ids = 0
        self._vocabulary = vocabulary
        self._canvas = canvas
        self.llm = LLM(
            str(path),
            dtype="float32",
            enforce_eager=True,
            max_model_len=longest + 2 * canvas,
            max_num_seqs=most,
            # Memory is profiled with as many rows, of logits too.
            max_num_batched_tokens=max(256, 2 * canvas * most),
            kv_cache_memory_bytes=128 << 20,
            disable_log_stats=True,
        )

    @property
    def runner(self) -> Any:
        """Model Runner V2."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def denoise(self, point: Point, num_steps: int) -> list[Step]:
        """Steps in which all requests of a point denoise, and nothing else happens."""
        engine, ids = self.llm.llm_engine, []
        for number in range(point["concurrency"]):
            ids.append(self._add(point["context"], seed=number))
        LOG.clear()
        steps: list[Step] = []
        while len(steps) <= num_steps:  # one to warm up
            engine.step()
            steps = [
                step
                for step in Trace(ranges=LOG).steps()
                if step.is_denoise_only and step.num_reqs == point["concurrency"]
            ]
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()
        return steps[1:]

    def _add(self, context: int, seed: int) -> str:
        from vllm import SamplingParams

        self._ids += 1
        prompt = random.Random(seed).choices(range(20, 500), k=context)
        params = SamplingParams(max_tokens=self._canvas, ignore_eos=True, detokenize=False, seed=1)
        name = f"point-{self._ids}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


def start_engines(points: Sequence[Point], folder: Path) -> dict[tuple[int, int], Engine]:
    """One engine for each checkpoint, with the parts of its steps named."""
    engines: dict[tuple[int, int], Engine] = {}
    functions: list[Named] = []
    for model in dict.fromkeys(point.model for point in points):
        sharing = [point for point in points if point.model == model]
        progress(f"starting the engine of canvas {model[0]}, vocabulary {model[1]}")
        engines[model] = Engine(folder / f"{model[0]}-{model[1]}", sharing)
        functions += worker_functions(engines[model].runner)
    functions += engine_functions(engines[points[0].model].llm.llm_engine.vllm_config)
    name_parts(functions)
    return engines


# --- measuring -----------------------------------------------------------------------------------


def measure(points: Sequence[Point], options: argparse.Namespace) -> list[dict[Point, Times]]:
    """Rounds of all points, each in another order; as many as a fit needs at least."""
    begin = time.monotonic()
    rounds: list[dict[Point, Times]] = []
    shuffled = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="dllm-scaling-") as folder:
        engines = start_engines(points, Path(folder))
        while len(rounds) < options.rounds:
            if len(rounds) >= MIN_ROUNDS and time.monotonic() - begin > options.budget_s:
                progress(f"--budget-s {options.budget_s}: {len(rounds)} rounds")
                break
            order = shuffled.sample(points, len(points))
            done = {p: times_of(engines[p.model].denoise(p, options.steps)) for p in order}
            rounds.append(done)
            progress(f"round {len(rounds)} of {options.rounds}")
    return rounds


# --- output --------------------------------------------------------------------------------------


def report(axis: str, rounds: Sequence[Mapping[Point, Times]]) -> list[dict[str, object]]:
    """Print the table of an axis and return its rows."""
    points = [point for point in rounds[0] if point.axis == axis]
    points.sort(key=lambda point: point.value)
    xs = [point.value for point in points]
    rows: list[dict[str, object]] = []
    print(f"\n{axis}: median ms of a denoise step [least .. most of {len(rounds)} rounds]")
    print("".join(f"{heading:>12}" for heading in (axis, *COMPONENTS)))
    for index, x in enumerate(xs):
        cells = []
        for component in COMPONENTS:
            values = [one[points[index]][component] for one in rounds]
            rows.append(_row(axis, x, component, "measured", values))
            cells.append(f"{statistics.median(values):12.3f}")
        values = [one[points[index]]["step"] for one in rounds]
        print(f"{x:12}{''.join(cells)}  [{min(values):.3f} .. {max(values):.3f}]")
    if len(rounds) < MIN_ROUNDS:
        print(f"  no fit: {len(rounds)} rounds, at least {MIN_ROUNDS} give an interval")
        return rows
    for component in COMPONENTS:
        series = [[one[point][component] for point in points] for one in rounds]
        growth = fit(xs, series)
        print(sentence(component, growth, bends_at(xs, series)))
        for x in xs:
            rows.append(
                _row(axis, x, component, "fit", [growth.at(x)])
                | {
                    "exponent": growth.exponent,
                    "exponent_low": growth.low,
                    "exponent_high": growth.high,
                    "growth": growth.word,
                }
            )
    return rows


def _row(
    axis: str, x: int, component: str, kind: str, values: Sequence[float]
) -> dict[str, object]:
    spread = (min(values), max(values)) if kind == "measured" else (None, None)
    return {
        "axis": axis,
        "value": x,
        "component": component,
        "kind": kind,
        "ms_per_step": statistics.median(values),
        "low_ms": spread[0],
        "high_ms": spread[1],
        "exponent": None,
        "exponent_low": None,
        "exponent_high": None,
        "growth": None,
    }


def sentence(component: str, growth: Growth, bend: float | None) -> str:
    """How a component grows, in words."""
    if growth.factor == 0:
        return f"  {component}: constant, {growth.constant:.3f} ms"
    text = (
        f"  {component}: {growth.word}, {growth.constant:.3f} ms + {growth.factor:.3g} ms "
        f"x^{growth.exponent:.2f} [{growth.low:.2f} .. {growth.high:.2f}]"
    )
    return text if bend is None else f"{text}; one more costs more than before from {bend:g} on"


def first_superlinear(rows: Sequence[Mapping[str, object]]) -> str:
    """Which component of which axis is superlinear, steps before their components."""
    fits = [row for row in rows if row["growth"] == "superlinear"]
    names = dict.fromkeys(f"{row['component']} against {row['axis']}" for row in fits)
    steps = [name for name in names if name.startswith("step")]
    if not names:
        return "Nothing grows superlinearly: no interval of an exponent lies above 1."
    return "Superlinear: " + "; ".join([*steps, *(name for name in names if name not in steps)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and the fits of every axis, write one CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="denoise steps of a point and round")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no fourth round after")
    parser.add_argument("--smoke", action="store_true", help="few small points, one round, no fit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    axes = SMOKE_AXES if options.smoke else {axis: AXES[axis] for axis in options.axis}
    if options.smoke:
        options.rounds, options.steps = 1, 2
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, one thread
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule what an engine is given
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    step_ranges.clock_ns = time.thread_time_ns
    rounds = measure([Point(axis, x) for axis, xs in axes.items() for x in xs], options)
    if torch.get_num_threads() != 1:
        print("More than one thread: start with OMP_NUM_THREADS=1.", file=sys.stderr)
        return 2
    rows = [row for axis in axes for row in report(axis, rounds)]
    print("\n" + first_superlinear(rows))
    shared = provenance("bench.scaling")
    path = options.results / "scaling.csv"
    write_csv(path, [row | shared for row in rows])
    print(path)
    return 0


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read once, when torch is imported
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench.scaling", *sys.argv[1:]])
    sys.exit(main())
