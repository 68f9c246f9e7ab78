"""Where the wall time of a denoise step goes, in a real engine.

    python -m bench.profile_step --server ours built-in --concurrency 1 8 32
    python -m bench.profile_step --random-60m --input-len 1024 8192 32768 --concurrency 1 \
        --server ours built-in ours built-in ours built-in

Each server is an engine in a process of its own, with its scheduler, worker and client. All blocks
take --steps denoise steps. Only engine steps in which every request denoises and none is
new are counted, without the fastest and the slowest tenth. A part's time is its mean over the
denoise steps in them, so that the parts add up to the mean step. Rows of an emitted block, whose KV
is written in the first pass of the next one, count, too. A pass with a canvas' rows that only
writes KV counts as a step: the built-in's commits, and with asynchronous scheduling ours. A moment
(on a GPU, of its stream) belongs to the part whose function was entered last and has not returned:

    engine      scheduling, input preparation, what is left of the engine's loop, output
    forward     the backbone, and self-conditioning before it
    head        logits
    sampler     row statistics, accept, renoise, stop, soft embeddings; alone: `bench.kernels`
    idle        between two steps of the engine

No table and exit code 1, unless every request got all of its tokens, as many canvas rows were seen
as its passes have (`passes_of`), and the parts cover --coverage of the client's time. --random-60m:
the released model's shape with 60 million random parameters; writes context_*.csv. A server that is
named several times is started as often.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.context import ROOT, Row, Rows, command_line, publish
from bench.serve import BUILTIN, OURS, write_generation_config
from bench.servers import BUILTIN_ENVIRONMENT, with_engine
from bench.step_parts import IDLE, PARTS, Recorder, Step, generate_ms, step_functions
from bench.tables import Section, grouped, markdown, spread_of
from bench.toys.tiny import tiny_config, write_checkpoint

# The released model's shape with 60 million parameters.
RANDOM_60M = {
    "vocab_size": 32_768,
    "hidden_size": 384,
    "intermediate_size": 768,
    "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 2,
    "num_attention_heads": 6,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 512,
    "canvas_length": 256,
    "max_position_embeddings": 65_536,
    "num_experts": 8,
    "moe_intermediate_size": 512,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    shown = CONTEXT if options.random_60m else STEP_TIME
    if torch.cuda.is_available():
        shown = replace(shown, file=shown.file.replace("cpu", "cuda"))
    path = options.results / shown.file
    rows: list[Row] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="dllm-profile-") as folder:
        if options.random_60m:
            options.model = write_checkpoint(Path(folder) / "model", tiny_config(**RANDOM_60M))
        for index, server in enumerate(options.server):
            environment = BUILTIN_ENVIRONMENT if server == BUILTIN else {}
            try:
                found = with_engine(measure, options, server, environment=environment)
                rows += [row | {"start": index} for row in found]
                publish(path, rows)
            except (RuntimeError, ValueError) as error:
                print(f"No table, because:\n{error}", file=sys.stderr)
                code = 1
    if rows:
        print(f"{shown(options.results)}\n\n{path}")
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument("--random-60m", action="store_true", help="instead of --model")
    parser.add_argument("--server", nargs="+", choices=(OURS, BUILTIN), default=[OURS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of every block")
    parser.add_argument("--blocks", type=int, default=4, help="of every request")
    parser.add_argument("--input-len", nargs="+", type=int, default=[64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    return parser.parse_args(arguments)


# --- in the process of a server ------------------------------------------------------------------


def measure(options: argparse.Namespace, server: str) -> list[Row]:
    """RuntimeError: an answer is too short. ValueError: as ``check_steps`` and ``mean_parts``."""
    rows, engine = [], Engine(options, server)
    for concurrency, length in product(options.concurrency, options.input_len):
        engine.work(concurrency, length)  # warms up, and compiles
        steps: list[Step] = []
        for _ in range(options.rounds):
            steps += engine.profile(concurrency, length)
        counted = [one for one in steps if one.is_denoise_only and one.num_reqs == concurrency]
        parts_ms = mean_parts(counted)
        step_ms = sum(parts_ms.values())
        print(f"{server}, {concurrency} at once, prompts of {length}: {step_ms:.3f} ms a step")
        about = {"server": server, "concurrency": concurrency, "input_len": length}
        for part, value in parts_ms.items():
            print(f"  {part:8} {value:9.3f} ms {value / step_ms:6.1%}", flush=True)
            rows.append(about | {"group": part, "share": value / step_ms, "step_ms": step_ms})
    return rows


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

    def __init__(self, options: argparse.Namespace, server: str) -> None:
        from vllm import LLM

        self._options = options
        self._canvas = json.loads((options.model / "config.json").read_text())["canvas_length"]
        self._folder = tempfile.TemporaryDirectory()  # read again when requests are made
        generation = Path(self._folder.name) / "generation"
        write_generation_config(options.model, generation, options.steps)
        given: dict[str, Any] = {
            "generation_config": str(generation),
            "max_model_len": max(options.input_len) + (options.blocks + 1) * self._canvas,
            "max_num_seqs": max(options.concurrency),
            "kv_cache_memory_bytes": 256 << 20,
        }
        self._llm = LLM(str(options.model), **(given | options.llm))
        is_async = self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        self._passes = passes_of(server, options.steps, bool(is_async))

    def profile(self, concurrency: int, length: int) -> list[Step]:
        """Raises ValueError if the steps do not account for what the client saw; says why."""
        recorder = Recorder(torch.cuda.is_available())
        with recorder.watching(step_functions(self._llm)):
            wall_ms = self.work(concurrency, length)
        of_block, unused = self._passes
        canvas_rows = concurrency * (self._options.blocks * of_block + unused) * self._canvas
        # A GPU may still run an engine step when all answers are there: asynchronous scheduling.
        most = 1.05 if torch.cuda.is_available() else 1.0
        check_steps(recorder.steps, wall_ms, canvas_rows, (self._options.coverage, most))
        return recorder.steps

    def work(self, concurrency: int, length: int) -> float:
        return generate_ms(self._llm, concurrency, length, self._options.blocks * self._canvas)


# --- numbers and table ---------------------------------------------------------------------------


def check_steps(
    steps: Sequence[Step], wall_ms: float, canvas_rows: int, allowed: tuple[float, float]
) -> None:
    """Raises ValueError if the recorded steps contradict what their client knows.

    ``wall_ms``: until all answers were there. ``canvas_rows``: in all passes of the requests.
    ``allowed``: which share of the time the parts have to cover, at least and at most.
    """
    rows = sum(step.num_canvas_rows * step.num_passes for step in steps)
    if rows != canvas_rows:
        raise ValueError(f"{rows} canvas rows instead of {canvas_rows}.")
    covered = sum(step.wall_ms - step.parts_ms[IDLE] for step in steps) / wall_ms
    least, most = allowed
    if not least <= covered <= most:
        raise ValueError(
            f"the parts cover {covered:.0%} of the {wall_ms:.1f} ms that the client waited; "
            f"allowed: {least:.0%} to {most:.0%}."
        )


def mean_parts(steps: Sequence[Step]) -> dict[str, float]:
    """Milliseconds in a denoise step, of the middle four fifths. Raises ValueError: too few."""
    num_steps = sum(step.num_passes for step in steps)
    if num_steps < 10:
        raise ValueError(f"{num_steps} denoise steps; at least 10 make a table.")
    ordered = sorted(steps, key=lambda step: step.wall_ms / step.num_passes)
    cut = len(ordered) // 10
    middle = ordered[cut : len(ordered) - cut]
    passes = sum(step.num_passes for step in middle)
    return {part: sum(step.parts_ms[part] for step in middle) / passes for part in PARTS}


def shares(rows: Rows) -> str:
    lines = []
    for (server, load, ms), here in grouped(rows, "server", "concurrency", "step_ms").items():
        sums = (sum(float(r["share"]) for r in here if r["group"] == part) for part in PARTS)
        lines.append([server, load, f"{float(ms):.2f}", *(f"{share:.0%}" for share in sums)])
    return markdown(["", "requests at once", "ms per step", *PARTS], lines)


def times_behind_prompts(rows: Rows) -> str:
    def of_starts(rows: Rows, server: str) -> list[float]:
        starts = grouped([row for row in rows if row["server"] == server], "start")
        return [float(here[0]["step_ms"]) for here in starts.values()]

    lines = []
    for (length,), here in grouped(rows, "input_len").items():
        ours, other = of_starts(here, OURS), of_starts(here, BUILTIN)
        # A server that was not asked for, or failed, has fewer starts.
        is_whole = len(ours) == len(other)
        pairs = [their / own for own, their in zip(ours, other, strict=True)] if is_whole else []
        found = ((ours, 0), (other, 0), (pairs, 2))
        lines.append([length, *(spread_of(n, digits) for n, digits in found)])
    heads = ["tokens of the prompt", "ours, ms a denoise step", "built-in", "built-in / ours"]
    return markdown(heads, lines)


STEP_TIME = Section("profile_cpu.csv", "python -m bench.profile_step", shares)
BEHIND_PROMPTS = (
    "python -m bench.profile_step --random-60m --input-len 1024 8192 32768 --concurrency 1 "
    "--server ours built-in"
)
CONTEXT = Section("context_cpu.csv", BEHIND_PROMPTS, times_behind_prompts)


if __name__ == "__main__":
    sys.exit(main())
