"""Where the wall time of a denoise step goes, in a real engine.

    python -m bench.profile_step                                  # ours, eager and compiled
    python -m bench.profile_step --server ours built-in --concurrency 1 8

Scheduler, worker and client run in one process (one for each server and mode: which implementation
serves is fixed when a process imports vLLM). It answers requests whose blocks all take --steps
denoise steps. Only visits of the engine in which every request denoises and nothing else runs are
counted, without the fastest and the slowest tenth. A component's time is its mean over the denoise
steps in them, so that the components add up to the mean step; with the denoise loop several steps
share the scheduling of a visit. A pass with a canvas' rows that only writes a block's KV counts as
a step: the built-in's commits, and with asynchronous scheduling ours.
`bench.step_parts` says which function belongs to which component.

There is no table and no CSV, and the exit code is 1, unless
    every request got all of its tokens,
    as many canvas rows were seen as the requests' passes have (`passes_of`), and
    the components cover --coverage of the time that the client waited.

What the measurement costs is printed with each table: the same work without it, in turn.
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

from bench.context import ROOT, Rows, command_line, provenance, read_csv, write_csv
from bench.servers import child_environment
from bench.step_parts import GROUPS, IDLE, Recorder, Step, step_functions
from bench.tables import markdown, section

OURS, BUILTIN = SERVERS = ("ours", "built-in")
MODES = ("eager", "compiled")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the CSV."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.here:
        return measure_here(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = options.results / f"profile_{device}.csv"
    rows: Rows = []
    code = 0
    shared = provenance("bench.profile_step")
    for mode, server in itertools.product(options.mode, options.server):
        with tempfile.TemporaryDirectory(prefix="dllm-profile-") as folder:
            chosen = ["--mode", mode, "--server", server, "--here", f"{folder}/rows.csv"]
            command = [sys.executable, "-m", "bench.profile_step", *arguments, *chosen]
            code |= subprocess.run(command, env=environment(server)).returncode
            rows += read_csv(Path(folder) / "rows.csv")
            if rows:
                write_csv(path, [row | shared for row in rows])
    print(f"{step_time(path)}\n\n{path}")
    return code


def environment(server: str) -> dict[str, str]:
    """Of a process in which an engine and its worker run without further processes."""
    chosen = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    chosen |= {"DLLM_DISABLE": "1"} if server == BUILTIN else {}
    return child_environment() | chosen


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=[OURS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of every block")
    parser.add_argument("--blocks", type=int, default=4, help="of every request")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # a CSV file
    options = parser.parse_args(arguments)
    options.model, options.results = options.model.resolve(), options.results.resolve()
    return options


# --- in the process of a server and mode ---------------------------------------------------------


def measure_here(options: argparse.Namespace) -> int:
    """Print the tables of one server and mode; their rows go to ``options.here``."""
    (server,), (mode,) = options.server, options.mode
    rows: list[dict[str, object]] = []
    try:
        engine = Engine(options, server, mode)
        for concurrency in options.concurrency:
            about = {"mode": mode, "server": server, "concurrency": concurrency}
            title = f"{server}, {mode}, {concurrency} at a time"
            engine.work(concurrency, seed=0)  # warms up, and compiles
            taken = [engine.profile(concurrency, index) for index in range(options.rounds)]
            rows += [about | row for row in report(title, taken, concurrency, options.coverage)]
            write_csv(options.here, rows)
    except (RuntimeError, ValueError) as error:
        print(f"No table, because:\n{error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Taken:
    """The steps of some work, and what its client saw.

    Attributes:
        plain_wall_ms, wall_ms: until all answers were there, without and with the recorder.
        canvas_rows: that the requests' passes have.
    """

    steps: list[Step]
    plain_wall_ms: float
    wall_ms: float
    canvas_rows: int


def passes_of(server: str, steps: int, is_async: bool) -> tuple[int, int]:
    """How many passes with canvas rows a block has, and a request behind its last block.

    For ``steps`` denoise steps of every block. The built-in commits a block in one pass more. With
    asynchronous scheduling, ours does so, too, also for the last block of a request; and when the
    built-in has committed that one, the next canvas is on its way.
    """
    is_builtin = server == BUILTIN
    return steps + (is_builtin or is_async), int(is_builtin and is_async)


class Engine:
    """An ``LLM`` whose blocks all take the same number of denoise steps."""

    def __init__(self, options: argparse.Namespace, server: str, mode: str) -> None:
        from vllm import LLM

        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule what is given here
        self._options = options
        self._canvas = json.loads((options.model / "config.json").read_text())["canvas_length"]
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
        is_async = self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        self._passes = passes_of(server, options.steps, bool(is_async))

    def profile(self, concurrency: int, index: int) -> Taken:
        """The work without and with the recorder."""
        plain_ms = self.work(concurrency, seed=2 * index + 1)
        with Recorder(step_functions(self._llm), torch.cuda.is_available()) as recorder:
            wall_ms = self.work(concurrency, seed=2 * index + 2)
        of_block, unused = self._passes
        passes = concurrency * (self._options.blocks * of_block + unused)
        return Taken(recorder.steps, plain_ms, wall_ms, passes * self._canvas)

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
            raise RuntimeError(f"{lengths} tokens instead of {output_len} for each request.")
        return wall_ms


# --- tables --------------------------------------------------------------------------------------


def report(
    title: str, taken: Sequence[Taken], concurrency: int, coverage: float
) -> list[dict[str, object]]:
    """Print a table and return its rows of the CSV, one for each component.

    Raises:
        ValueError: the steps do not account for what the client saw; the message says which.
    """
    problems = [problem for one in taken for problem in step_problems(one, coverage)]
    if problems:
        raise ValueError("\n".join(f"{title}: {problem}" for problem in problems))
    steps = [step for one in taken for step in one.steps]
    parts_ms = mean_parts(
        [step for step in steps if step.is_denoise_only and step.num_reqs == concurrency]
    )
    step_ms = sum(parts_ms.values())
    slower = statistics.median(one.wall_ms / one.plain_wall_ms for one in taken)
    print(f"{title}: {step_ms:.3f} ms a step; recorded / not recorded: {slower:.3f}")
    for part, value in parts_ms.items():
        print(f"  {part:30} {value:9.3f} ms {value / step_ms:6.1%}", flush=True)
    return [
        {"component": part, "group": GROUPS[part], "share": value / step_ms, "step_ms": step_ms}
        for part, value in parts_ms.items()
    ]


def step_problems(taken: Taken, coverage: float) -> list[str]:
    """Where the recorded steps and their client disagree."""
    problems = []
    rows = sum(step.num_canvas_rows * step.num_passes for step in taken.steps)
    if rows != taken.canvas_rows:
        problems.append(f"{rows} canvas rows instead of {taken.canvas_rows}.")
    named_ms = sum(step.wall_ms - step.parts_ms[IDLE] for step in taken.steps)
    if not coverage <= named_ms / taken.wall_ms <= 1:
        problems.append(
            f"the components cover {named_ms / taken.wall_ms:.0%} of the {taken.wall_ms:.1f} ms "
            f"that the client waited; allowed: {coverage:.0%} to 100%."
        )
    return problems


def mean_parts(visits: Sequence[Step]) -> dict[str, float]:
    """Milliseconds of each component in a denoise step, mean over the middle four fifths of visits.

    Raises:
        ValueError: there are too few steps for that to mean anything.
    """
    num_steps = sum(visit.num_passes for visit in visits)
    if num_steps < 10:
        raise ValueError(f"{num_steps} denoise steps; at least 10 make a table.")
    ordered = sorted(visits, key=lambda visit: visit.wall_ms / visit.num_passes)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    passes = sum(visit.num_passes for visit in middle)
    return {part: sum(visit.parts_ms[part] for visit in middle) / passes for part in GROUPS}


def step_time(path: Path) -> str:
    """The shares of the groups of a CSV of this command: a line for each server, mode and load."""
    return section(path, "python -m bench.profile_step", _groups)


def _groups(rows: Rows) -> str:
    groups = list(dict.fromkeys(GROUPS.values()))
    lines = []
    for bar in dict.fromkeys((r["mode"], r["server"], r["concurrency"]) for r in rows):
        here = [r for r in rows if (r["mode"], r["server"], r["concurrency"]) == bar]
        mode, server, load = bar
        shares = (sum(float(r["share"]) for r in here if r["group"] == group) for group in groups)
        cells = [f"{share:.0%}" for share in shares]
        lines.append([f"{server}, {mode}", load, f"{float(here[0]['step_ms']):.2f}", *cells])
    return markdown((["", "requests at once", "ms per step", *groups], lines))


if __name__ == "__main__":
    sys.exit(main())
