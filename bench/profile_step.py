"""Where the wall time of a denoise step goes, in a real engine.

    python -m bench.profile_step                                  # ours, eager and compiled
    python -m bench.profile_step --server ours built-in --concurrency 1 8
    python -m bench.profile_step --traces DIR                     # on a GPU: kernels, for Perfetto

Scheduler, worker and client run in one process (one for each server and mode: which implementation
serves is fixed when a process imports vLLM), without a second thread that would blur the times. It
answers requests whose blocks all take --steps denoise steps. Only steps in which every request
denoises and nothing else runs are counted, without the fastest and the slowest tenth; a component's
time is its mean over them, so that the components add up to the mean step. `bench.step_parts` says
which function belongs to which component, `bench.step_trace` how an instant is attributed.

There is no table and no CSV, and the exit code is 1, unless
    every request got all of its tokens,
    as many canvas rows were seen as the requests took denoise steps,
    the steps cover --coverage of the time that the client waited, and
    the components without the gaps cover --coverage of the counted steps (on a CPU; on a GPU gaps
    are what one looks for).

On a CPU two reads of a clock are taken for each component; on a GPU torch.profiler runs as well,
which slows every operation down. What either cost is in the table: the same work without it, in
turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.context import RESULTS, ROOT, Rows, provenance, read_csv, write_csv
from bench.servers import child_environment
from bench.step_parts import GROUPS, IDLE, LOG, name_parts, step_functions, unname_parts
from bench.step_trace import Step, Trace
from bench.tables import markdown, measured_with

OURS, BUILTIN = SERVERS = ("ours", "built-in")
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Breakdown:
    """The mean step of some, by component."""

    step_ms: float
    num_steps: int
    parts_ms: dict[str, float]
    low_ms: dict[str, float]
    high_ms: dict[str, float]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Breakdown:
        """Of the middle four fifths of the steps, by wall time.

        Raises:
            ValueError: there are too few for that to mean anything.
        """
        if len(steps) < 10:
            raise ValueError(f"{len(steps)} denoise steps; at least 10 make a table.")
        ordered = sorted(steps, key=lambda step: step.wall_ms)
        cut = len(ordered) // 10
        middle = ordered[cut : len(ordered) - cut]
        columns = {part: sorted(step.parts_ms[part] for step in middle) for part in GROUPS}
        tenth = len(middle) // 10
        return cls(
            statistics.fmean(step.wall_ms for step in middle),
            len(middle),
            {part: statistics.fmean(values) for part, values in columns.items()},
            {part: values[tenth] for part, values in columns.items()},
            {part: values[-1 - tenth] for part, values in columns.items()},
        )

    @property
    def named_share(self) -> float:
        """What the components cover without the gaps."""
        return 1 - self.parts_ms[IDLE] / self.step_ms

    def rows(self) -> list[dict[str, object]]:
        """A row of the CSV for each component; their shares add up to 1."""
        return [
            {
                "component": part,
                "group": group,
                "ms_per_step": self.parts_ms[part],
                "share": self.parts_ms[part] / self.step_ms,
                "step_ms": self.step_ms,
                "steps": self.num_steps,
            }
            for part, group in GROUPS.items()
        ]

    def table(self, title: str) -> str:
        """One line a component that took any time."""
        lines = [f"{title}: {self.step_ms:.3f} ms a step, mean of {self.num_steps}"]
        for part, value in self.parts_ms.items():
            if self.high_ms[part] > 0:
                spread = f"[{self.low_ms[part]:.3f} .. {self.high_ms[part]:.3f}]"
                lines.append(f"  {part:30} {value:9.3f} ms {value / self.step_ms:6.1%}  {spread}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the CSV."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.here:
        return measure_here(options)
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="dllm-profile-") as folder:
        for mode, server in itertools.product(options.mode, options.server):
            path = Path(folder) / f"{server}-{mode}.csv"
            chosen = ["--mode", mode, "--server", server, "--here", str(path)]
            command = [sys.executable, "-m", "bench.profile_step", *arguments, *chosen]
            code = subprocess.run(command, env=environment(server)).returncode
            if code:
                return code
            rows += read_csv(path)
    path = options.results / f"profile_{'cuda' if torch.cuda.is_available() else 'cpu'}.csv"
    shared = provenance("bench.profile_step")
    write_csv(path, [row | shared for row in rows])
    print(path)
    return 0


def environment(server: str) -> dict[str, str]:
    """Of a process in which an engine and its worker run without further processes."""
    chosen = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    chosen |= {"DLLM_DISABLE": "1"} if server == BUILTIN else {}
    return child_environment() | chosen


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=[OURS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of every block")
    parser.add_argument("--blocks", type=int, default=4, help="of every request")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="with and without the profiler")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    parser.add_argument("--traces", type=Path, help="keep a GPU's traces in this folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # set by this command itself
    options = parser.parse_args(arguments)
    options.model, options.results = options.model.resolve(), options.results.resolve()
    return options


# --- in the process of a server and mode ---------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Some work with the parts named, and what its client saw.

    Attributes:
        plain_wall_ms, wall_ms: until all answers were there, without and with the profiler.
        canvas_rows: that the requests' denoise steps have, and the built-in's commits.
    """

    trace: Trace
    plain_wall_ms: float
    wall_ms: float
    canvas_rows: int


def measure_here(options: argparse.Namespace) -> int:
    """Print the tables of one server and mode and write their rows to ``options.here``."""
    (server,), (mode,) = options.server, options.mode
    rows: list[dict[str, object]] = []
    try:
        engine = Engine(options, server, mode)
        for concurrency in options.concurrency:
            engine.work(concurrency, seed=0)  # warms up, and compiles
            taken = [engine.profile(concurrency, index) for index in range(options.rounds)]
            title = f"{server}, {mode}, {concurrency} at a time"
            about = {"mode": mode, "server": server, "concurrency": concurrency}
            rows += [about | row for row in report(title, taken, concurrency, options.coverage)]
    except (RuntimeError, ValueError) as error:
        print(f"No table, because:\n{error}", file=sys.stderr)
        return 1
    write_csv(options.here, rows)
    return 0


class Engine:
    """An ``LLM`` whose blocks all take the same number of denoise steps."""

    def __init__(self, options: argparse.Namespace, server: str, mode: str) -> None:
        from vllm import LLM

        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule what is given here
        self._options, self._name = options, f"{server}-{mode}"
        self._passes = options.steps + (server == BUILTIN)  # its commits are passes with a canvas
        self._canvas = json.loads((options.model / "config.json").read_text())["canvas_length"]
        self._has_gpu = torch.cuda.is_available()
        generation = json.loads((options.model / "generation_config.json").read_text())
        generation |= {"max_denoising_steps": options.steps, "confidence_threshold": 0.0}
        self._generation = tempfile.TemporaryDirectory()  # read again when requests are made
        folder = self._generation.name
        (Path(folder) / "generation_config.json").write_text(json.dumps(generation))
        given: dict[str, Any] = {
            "generation_config": folder,
            "enforce_eager": mode == "eager",
            "max_model_len": options.input_len + (options.blocks + 1) * self._canvas,
            "max_num_seqs": max(options.concurrency),
            "kv_cache_memory_bytes": 256 << 20,
        }
        self._llm = LLM(str(options.model), **(given | options.llm))

    def profile(self, concurrency: int, index: int) -> Taken:
        """The work without and with the profiler; which of them comes first alternates."""
        wall_ms, trace = 0.0, Trace()
        for is_profiled in (False, True) if index % 2 == 0 else (True, False):
            if is_profiled:
                wall_ms, trace = self._profiled(concurrency, index, seed=2 * index + 2)
            else:
                plain_ms = self.work(concurrency, seed=2 * index + 1)
        rows = concurrency * self._options.blocks * self._canvas * self._passes
        return Taken(trace, plain_ms, wall_ms, rows)

    def _profiled(self, concurrency: int, index: int, seed: int) -> tuple[float, Trace]:
        """Milliseconds of the work with its parts named, and what was seen."""
        name_parts(step_functions(self._llm))
        try:
            if not self._has_gpu:
                return self.work(concurrency, seed), Trace(ranges=LOG.copy())
            activities = torch.profiler.ProfilerActivity
            with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiler:
                wall_ms = self.work(concurrency, seed)
        finally:
            unname_parts()
        with tempfile.TemporaryDirectory() as folder:
            kept = self._options.traces or Path(folder)
            kept.mkdir(parents=True, exist_ok=True)
            path = kept / f"{self._name}-{concurrency}-{index}.json.gz"
            profiler.export_chrome_trace(str(path))
            return wall_ms, Trace.read(path)

    def work(self, concurrency: int, seed: int) -> float:
        """Milliseconds until all answers are there; prompts differ, so nothing is found cached.

        Raises:
            RuntimeError: an answer has too few tokens.
        """
        from vllm import SamplingParams, TokensPrompt

        output_len = self._options.blocks * self._canvas
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
        prompts = [
            TokensPrompt(
                prompt_token_ids=[
                    20 + (seed * 31 + number * 7 + position * (seed + 3)) % 100
                    for position in range(self._options.input_len)
                ]
            )
            for number in range(concurrency)
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        wall_ms = 1e3 * (time.perf_counter() - start)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != [output_len] * concurrency:
            raise RuntimeError(f"{self._name}: {lengths} tokens instead of {output_len} each.")
        return wall_ms


# --- what makes a table --------------------------------------------------------------------------


def report(
    title: str, taken: Sequence[Taken], concurrency: int, coverage: float
) -> list[dict[str, object]]:
    """Print a table and return its rows.

    Raises:
        ValueError: a trace does not account for what the client saw; the message says which.
    """
    problems = [problem for one in taken for problem in trace_problems(one, coverage)]
    if problems:
        raise ValueError("\n".join(f"{title}: {problem}" for problem in problems))
    steps = [
        step
        for one in taken
        for step in one.trace.steps()
        if step.is_denoise_only and step.num_reqs == concurrency
    ]
    breakdown = Breakdown.of(steps)
    if breakdown.named_share < coverage and not any(one.trace.kernels for one in taken):
        raise ValueError(
            f"{title}: the named parts cover {breakdown.named_share:.0%} of a step; "
            f"--coverage asks for {coverage:.0%}."
        )
    slower = statistics.median(one.wall_ms / one.plain_wall_ms for one in taken)
    print(f"{breakdown.table(title)}\n  with the profiler / without: {slower:.3f}", flush=True)
    return [row | {"slowed_by": slower} for row in breakdown.rows()]


def trace_problems(taken: Taken, coverage: float) -> list[str]:
    """Where a trace and its client disagree."""
    problems = []
    rows = taken.trace.num_canvas_rows()
    if rows != taken.canvas_rows:
        problems.append(f"{rows} canvas rows instead of {taken.canvas_rows}.")
    share = taken.trace.span_ms() / taken.wall_ms
    if not coverage <= share <= 1:
        problems.append(
            f"the steps cover {share:.0%} of the {taken.wall_ms:.1f} ms that the client waited; "
            f"allowed: {coverage:.0%} to 100%."
        )
    return problems


def step_time(results: Path) -> str:
    """Section of docs/benchmarks.md: shares by group, a line for each server, mode and load."""
    rows = read_csv(results / "profile_cpu.csv")
    if not rows:
        return "Not measured yet: `python -m bench.profile_step`."
    groups = list(dict.fromkeys(GROUPS.values()))
    lines = []
    for bar in dict.fromkeys((r["mode"], r["server"], r["concurrency"]) for r in rows):
        here = [r for r in rows if (r["mode"], r["server"], r["concurrency"]) == bar]
        mode, server, load = bar
        shares = (sum(float(r["share"]) for r in here if r["group"] == group) for group in groups)
        cells = [f"{share:.0%}" for share in shares]
        lines.append([f"{server}, {mode}", load, f"{float(here[0]['step_ms']):.2f}", *cells])
    table = markdown((["", "requests at once", "ms per step", *groups], lines))
    return f"{table}\n\n{measured_with(rows, 'profile_cpu.csv')}"


if __name__ == "__main__":
    sys.exit(main())
