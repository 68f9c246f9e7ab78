"""Ours beside what a user would run instead: the same engine, the same runtime, the same flags.

    python -m bench.serve                       # compiled; the tables of our pages
    python -m bench.serve --schedule fixed --concurrency 1 --rounds 9
    python -m bench.serve --contestants ours "built-in --max-num-seqs 32" --concurrency 32
    python -m bench.serve --no-http             # the engine alone, without servers

A contestant is one of the names below and more flags for its server, so that a setting is compared
with another one, too. The first is compared with each of the others.

    ours          plain ``vllm serve``
    built-in      the same with DLLM_DISABLE=1: vLLM's own DiffusionGemma, on the same CPU runtime
    tiny-ar       the autoregressive twin of tiny-dllm, of the same size and training questions;
                  without speculation, and greedy, because sampling makes it answer worse
    transformers  Hugging Face's ``generate`` at batch 1, eager, which is its default
    diffusers     its pipeline for models with blocks (--model checkpoints/tiny-sdar), at batch 1
    loop          the plain loop of LLaDA, Dream or Fast-dLLM v2 (--model checkpoints/tiny-llada)

They are driven one at a time by ``vllm bench serve``, while the others stand still; each round
begins with another one. ``bench/runs.py`` says what is asked. There is no table unless each server
first answers with the number of tokens asked for, and two equal seeded requests equally (the
built-in refuses a seed). Written to --results: --file, one row a run.

--no-http: each run of a contestant is an ``LLM`` with its scheduler and worker in one process. The
questions are given to ``LLM.chat``, --concurrency of them in each call, of which the next one
follows when all are answered. Denoise steps are not counted, equal seeds are not compared, and
there are neither request rates nor ``fixed``.
"""

import argparse
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import local
from bench.context import ROOT, Row, command_line, publish, read_csv, reporting_failures
from bench.local import LOOP, PIPELINE, REFERENCE, answer_questions, chat
from bench.race import Contestant, add_options, admit, race_workloads, rounds, start_all
from bench.runs import (
    ADAPTIVE,
    BUILTIN_PASSES,
    FIXED,
    NO_CANVAS,
    OVERLAPPED,
    UNCOUNTED,
    Shape,
    Workload,
)
from bench.servers import BUILTIN_ENVIRONMENT, Server, with_engine
from bench.tables import load_tables
from dllm.settings.command import CommandError, positive

KINDS = OURS, BUILTIN, AUTOREGRESSIVE = "ours", "built-in", "tiny-ar"
SERVING, ENGINE = "serve_compiled.csv", "engine.csv"
LOCAL = (REFERENCE, PIPELINE, LOOP)  # without a server
LENGTHS = ("block_size", "canvas_length", "gen_length", "bd_size")  # as config.json calls it


@dataclass(frozen=True)
class Spec:
    name: str
    kind: str
    flags: tuple[str, ...] = ()
    source: Path | None = None  # that the plugin is imported from, in place of the installed one

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Raises argparse.ArgumentTypeError if there is no such kind."""
        kind, *flags = shlex.split(text)
        if kind not in (*KINDS, *LOCAL) or (flags and not flags[0].startswith("--")):
            allowed = ", ".join((*KINDS, *LOCAL))
            raise argparse.ArgumentTypeError(
                f"{text!r}; allowed: one of {allowed}, then flags of `vllm serve`."
            )
        return cls(text, kind, tuple(flags))

    @property
    def commits(self) -> str:
        if self.kind != OURS:
            return NO_CANVAS if self.kind == AUTOREGRESSIVE else BUILTIN_PASSES
        given = re.sub(r'[\s":.]+', " ", " ".join(self.flags))  # --a.b.KEY VALUE, or JSON
        has_none = "decoding ar" in given or "decoding self_speculation" in given
        return NO_CANVAS if has_none else OVERLAPPED


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    path = options.results / options.file
    measure(options, lambda rows: publish(path, rows))
    rows = read_csv(path)
    print(f"\n{load_tables(rows)}\n\n{path}")
    first = options.contestants[0].name
    return int(any(row["problem"] for row in rows if row["contestant"] == first))


def measure(options: argparse.Namespace, save: Callable[[list[Row]], None]) -> None:
    """All schedules, each with servers of its own; ``save`` gets all rows, after each load.

    Raises CommandError: no contestant takes any of the loads.
    """
    rows: list[Row] = []
    for schedule in options.schedule:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
            racing = contestants(options, schedule, folder)
            at_once = max(options.concurrency, default=1)
            start_all(racing, partial(admit, shape=options.shape, at_once=at_once), stack)
            loads = workloads(options, schedule)
            turns = rounds(options.rounds, 60 * options.minutes / len(options.schedule))
            found: list[Row] = []
            for found in race_workloads(racing, loads, turns):
                save([*rows, *found])
            rows += found
    if not rows:
        raise CommandError("no load has a contestant that takes it: name others, or other loads.")


def workloads(options: argparse.Namespace, schedule: str) -> list[Workload]:
    """Every load; random tokens, which take longer, fewer times and without request rates."""
    shape, count = options.shape, options.num_requests
    if schedule == FIXED:
        sizes = [(n, max(2 * n, count // 4, 1)) for n in options.concurrency]
        return [Workload(FIXED, k, shape, n, steps_per_block=options.steps) for n, k in sizes]
    make = partial(Workload, schedule, shape=shape)
    return [
        # In whole batches, which matters without HTTP.
        *(make(max(2, math.ceil(count / n)) * n, concurrency=n) for n in options.concurrency),
        *(make(count, rate=rate) for rate in options.rates),
    ]


def contestants(options: argparse.Namespace, schedule: str, folder: Path) -> list[Contestant]:
    """The contestants for which a schedule has a meaning; their servers are not started."""
    generation = folder / "generation"
    write_generation_config(options.model, generation, options.steps if schedule == FIXED else None)
    config = json.loads((options.model / "config.json").read_text())
    has_many = "canvas_length" not in config and "nemotron" not in config["model_type"]
    found = []
    for index, spec in enumerate(options.contestants):
        is_twin, is_local = spec.kind == AUTOREGRESSIVE, spec.kind in LOCAL
        if schedule == FIXED and (is_twin or is_local):
            continue
        model = ROOT / "checkpoints/tiny-ar" if is_twin else options.model
        flags = () if is_twin else ("--generation-config", str(generation))
        flags = (*flags, *options.serve_flags, *spec.flags)
        environment = dict(BUILTIN_ENVIRONMENT) if spec.kind == BUILTIN else {}
        if spec.source is not None:
            environment["PYTHONPATH"] = str(spec.source)
        server = answer = None
        if is_local:
            answer = partial(with_engine, answer_questions, spec.kind, model)
        elif options.no_http:
            answer = partial(with_engine, chat, str(model), flags, environment=environment)
        else:
            log = folder / f"{index}.log"
            server = Server(spec.name, str(model), log, flags, environment)
        is_uncounted = options.no_http or (has_many and spec.commits == OVERLAPPED)
        found.append(
            Contestant(
                spec.name,
                server,
                UNCOUNTED if is_uncounted else spec.commits,
                client_flags=("--temperature", "0") if is_twin else (),
                takes_seeds=spec.kind != BUILTIN,
                answer=answer,
                one_by_one=spec.kind in (REFERENCE, PIPELINE),
            )
        )
    return found


def write_generation_config(model: Path, folder: Path, steps: int | None) -> None:
    """The checkpoint's generation_config.json, with ``steps`` denoise steps a block if given.

    A file, because the built-in does not read ``--override-generation-config``.
    """
    generation = json.loads((model / "generation_config.json").read_text())
    if steps is not None:
        generation |= {"max_denoising_steps": steps, "confidence_threshold": 0.0}
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(generation))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-dllm")
    parser.add_argument("--contestants", nargs="+", type=Spec.parse, help="see above")
    parser.add_argument(
        "--schedule", nargs="+", choices=(ADAPTIVE, FIXED), default=[ADAPTIVE, FIXED]
    )
    parser.add_argument("--no-http", action="store_true", help="LLM.chat in place of servers")
    parser.add_argument("--steps", type=positive, default=16, help="per block, fixed schedule")
    parser.add_argument("--file", help=f"name of the CSV file ({SERVING}; --no-http: {ENGINE})")
    add_options(parser, rounds=3, minutes=14, num_requests=100, concurrency=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[8, 24], help="requests per s")
    parser.add_argument("--input-len", type=int, default=64, help="of random prompts")
    parser.add_argument("--output-len", type=int, default=64, help="of answers to them")
    given = parser.parse_args(arguments)
    if not (given.model / "config.json").exists():
        parser.error(f"--model {given.model}: no config.json there; give a checkpoint's folder.")
    config = json.loads((given.model / "config.json").read_text())
    try:
        length = next((config[name] for name in LENGTHS if name in config), 1)
        given.shape = Shape(length, given.input_len, given.output_len)
    except ValueError as error:
        parser.error(str(error))
    has_blocks = "canvas_length" not in config  # some begin in a prompt, edits take other steps
    alone = [PIPELINE] * local.is_installed() if "block_size" in config else [LOOP]
    kinds = [OURS, AUTOREGRESSIVE, *alone] if has_blocks else [*KINDS, REFERENCE]
    given.contestants = given.contestants or [Spec.parse(kind) for kind in kinds]
    if has_blocks:
        given.schedule = [ADAPTIVE]
    if given.no_http:
        given.schedule, given.rates = [ADAPTIVE], []
    given.file = given.file or (ENGINE if given.no_http else SERVING)
    return given


if __name__ == "__main__":
    sys.exit(main())
