"""Ours beside what a user would run instead: the same engine, the same runtime, the same flags.

    python -m bench.serve                       # compiled; the tables of our pages
    python -m bench.serve --eager               # with --enforce-eager
    python -m bench.serve --schedule fixed --concurrency 1 --rounds 9
    python -m bench.serve --contestants ours "built-in --max-num-seqs 32" --concurrency 32
    python -m bench.serve --contestants ours "ours --additional-config.dllm.commit separate"

A contestant is one of the names below and more flags for its server, so that a setting is compared
with another one, too. The first is compared with each of the others.

    ours          plain ``vllm serve``
    built-in      the same with DLLM_DISABLE=1: vLLM's own DiffusionGemma, on the same CPU runtime
    tiny-ar       the autoregressive twin of tiny-dllm, of the same size and training questions;
                  without speculation, and greedy, because sampling makes it answer worse
    transformers  Hugging Face's ``generate`` at batch 1, eager, which is its default
    diffusers     its pipeline for models with blocks (--model checkpoints/tiny-sdar), at batch 1

Contestants are driven one at a time by the real ``vllm bench serve``, while the others stand still.
Each round begins with another contestant, so that a machine that gets slower or faster meanwhile
does so to all. ``bench/workloads.py`` says what is asked: questions whose blocks stop when they
converge (``adaptive``), random tokens with --steps denoise steps for every block (``fixed``).

Before anything is timed, each server must answer with HTTP 200 and exactly the number of tokens
asked for, and two equal seeded requests equally (the built-in refuses a seed); otherwise there is
no table. A run that is wrong (incomplete, of another length, of another number of denoise steps on
the fixed schedule, or with fewer right answers than chance allows) has no speed.

Written to --results: serve_MODE.csv, one row a run.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import pipeline
from bench.client import Client, answer_by_pipeline, answer_questions
from bench.context import (
    as_text,
    command_line,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.measure import (
    BUILTIN_PASSES,
    COMMIT_APART,
    NO_CANVAS,
    OVERLAPPED,
    PROMPT_APART,
    csv_rows,
)
from bench.race import Contestant, Measured, Race, start_all
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import load_tables
from bench.workloads import ADAPTIVE, FIXED, Shape, Workload, card_accuracy

KINDS = ("ours", "built-in", "tiny-ar", "transformers", "diffusers")
OURS, BUILTIN, AUTOREGRESSIVE, REFERENCE, PIPELINE = KINDS
LOCAL = {REFERENCE: answer_questions, PIPELINE: answer_by_pipeline}  # without a server


@dataclass(frozen=True)
class Spec:
    """A contestant as it is named on the command line: ``KIND --flags of its server``."""

    name: str
    kind: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Raises argparse.ArgumentTypeError if there is no such kind."""
        kind, *flags = shlex.split(text)
        if kind not in KINDS or (flags and not flags[0].startswith("--")):
            raise argparse.ArgumentTypeError(
                f"{text!r}; allowed: one of {', '.join(KINDS)}, then flags of `vllm serve`."
            )
        return cls(text, kind, tuple(flags))

    @property
    def commits(self) -> int:
        """How its passes are counted."""
        if self.kind != OURS:
            return NO_CANVAS if self.kind == AUTOREGRESSIVE else BUILTIN_PASSES
        given = " ".join(self.flags)  # as --additional-config.dllm.KEY VALUE, or as JSON
        options = {"first_step": PROMPT_APART, "commit": COMMIT_APART}
        apart = (how for key, how in options.items() if re.search(rf"{key}\W+separate", given))
        return sum(apart, start=OVERLAPPED)


def workloads(options: argparse.Namespace, schedule: str) -> list[Workload]:
    """Every load; random tokens, which take longer, fewer times and without request rates."""
    shape, count = options.shape, options.num_requests
    if schedule == FIXED:
        sizes = [(n, max(2 * n, count // 4, 1)) for n in options.concurrency]
        return [Workload(FIXED, k, shape, n, steps_per_block=options.steps) for n, k in sizes]
    return [
        *(Workload(ADAPTIVE, max(2 * n, count), shape, n) for n in options.concurrency),
        *(Workload(ADAPTIVE, count, shape, rate=rate) for rate in options.rates),
    ]


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the CSV files."""
    options = parse(arguments)
    measured: Measured = []
    path = options.results / f"serve_{'eager' if options.eager else 'compiled'}.csv"
    about = provenance("bench.serve")
    deadline = time.monotonic() + 60 * options.minutes
    for index, schedule in enumerate(options.schedule):
        sizes = [len(workloads(options, other)) for other in options.schedule[index:]]
        left_s = (deadline - time.monotonic()) * sizes[0] / sum(sizes)

        def save(more: Measured, before: Measured = measured) -> None:
            write_csv(path, csv_rows([*before, *more], about))

        measured = [*measured, *measure(options, schedule, time.monotonic() + left_s, save)]
    print(f"\n{load_tables(as_text(csv_rows(measured, about)))}\n\n{path}")
    first = options.contestants[0].name
    return 1 if any(one.problem for _, one in measured if one.contestant == first) else 0


def measure(
    options: argparse.Namespace, schedule: str, deadline: float, save: Callable[[Measured], None]
) -> Measured:
    """All rounds of one schedule; what was measured is saved after each load.

    Args:
        deadline: of ``time.monotonic``; no round begins that would end later.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a server or client failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        racing = contestants(options, schedule, folder)
        most = max(options.concurrency, default=1)
        start_all(racing, options.shape, most, stack)
        budget_s = deadline - time.monotonic()
        loads = workloads(options, schedule)
        return Race(racing, loads, options.rounds, Client(folder), budget_s).run(save)


# --- who is measured -----------------------------------------------------------------------------


def contestants(options: argparse.Namespace, schedule: str, folder: Path) -> list[Contestant]:
    """Those that a schedule has a meaning for, their servers not started."""
    generation = folder / "generation"
    write_generation_config(options.model, generation, options.steps if schedule == FIXED else None)
    eager = ("--enforce-eager",) if options.eager else ()
    found = []
    for index, spec in enumerate(options.contestants):
        is_twin = spec.kind == AUTOREGRESSIVE
        if schedule == FIXED and spec.kind in (AUTOREGRESSIVE, *LOCAL):
            continue
        model = options.autoregressive if is_twin else options.model
        flags = () if is_twin else ("--generation-config", str(generation))
        served = ServerOptions(
            spec.name,
            str(model),
            (*flags, *eager, *options.serve_flags, *spec.flags),
            (("DLLM_DISABLE", "1"),) if spec.kind == BUILTIN else (),
        )
        found.append(
            Contestant(
                spec.name,
                model,
                spec.commits,
                None if spec.kind in LOCAL else Server(served, folder / f"{index}.log"),
                client_flags=("--temperature", "0") if is_twin else (),
                takes_seeds=spec.kind != BUILTIN,
                expected=card_accuracy(model),
                local=LOCAL.get(spec.kind, answer_questions),
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


# --- command line --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=Path("checkpoints/tiny-dllm"))
    parser.add_argument("--autoregressive", type=Path, default=Path("checkpoints/tiny-ar"))
    parser.add_argument(
        "--contestants", nargs="+", type=Spec.parse, default=[Spec.parse(kind) for kind in KINDS]
    )
    parser.add_argument(
        "--schedule", nargs="+", choices=(ADAPTIVE, FIXED), default=[ADAPTIVE, FIXED]
    )
    parser.add_argument("--steps", type=int, default=16, help="per block, fixed schedule")
    parser.add_argument("--eager", action="store_true", help="serve with --enforce-eager")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=14, help="no round begins that ends later")
    parser.add_argument(
        "--num-requests", type=int, default=100, help="of a run, at least (random: a quarter)"
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rates", type=float, nargs="*", default=[8, 24], help="requests per s")
    parser.add_argument("--input-len", type=int, default=64, help="of random prompts")
    parser.add_argument("--output-len", type=int, default=64, help="of answers to them")
    add_serve_flags(parser)
    given = parser.parse_args(arguments)
    for flag, value in (("--rounds", given.rounds), ("--steps", given.steps)):
        if value < 1:
            parser.error(f"{flag} {value}; allowed: at least 1.")
    try:
        length = canvas_length(parser, given.model)
        given.shape = Shape(length, given.input_len, given.output_len)
    except ValueError as error:
        parser.error(str(error))
    if not (given.autoregressive / "config.json").exists():
        _leave_out(given, (AUTOREGRESSIVE,), f"{given.autoregressive} is not there")
    if "block_size" in json.loads((given.model / "config.json").read_text()):
        _leave_out(given, (BUILTIN, REFERENCE), f"{given.model} has blocks")
        if not pipeline.is_installed():
            _leave_out(given, (PIPELINE,), pipeline.MISSING)
        given.schedule = [ADAPTIVE]  # blocks that begin in a prompt, and edits, take other steps
    else:
        _leave_out(given, (PIPELINE,), f"{given.model} has no blocks")
    return given


def _leave_out(given: argparse.Namespace, kinds: tuple[str, ...], why: str) -> None:
    """Take contestants out, and say so."""
    left_out = [spec.name for spec in given.contestants if spec.kind in kinds]
    if left_out:
        progress(f"{why}: no column of {', '.join(left_out)}")
    given.contestants = [spec for spec in given.contestants if spec.kind not in kinds]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """``--serve-flags``, a list of strings."""
    parser.add_argument(
        "--serve-flags",
        type=shlex.split,
        default=list(SERVE_FLAGS),
        help="of all servers, in one string",
    )


def canvas_length(parser: argparse.ArgumentParser, model: Path) -> int:
    """Tokens of a canvas, or of a block; exits with a message where there is no checkpoint."""
    config = model / "config.json"
    if not config.exists():
        parser.error(f"--model {model}: no config.json there; give a checkpoint's folder.")
    read = json.loads(config.read_text())
    return int(read["block_size"] if "block_size" in read else read["canvas_length"])


if __name__ == "__main__":
    sys.exit(main())
