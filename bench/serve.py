"""Ours beside what a user would run instead: the same engine, the same runtime, the same flags.

    python -m bench.serve                       # compiled; the table of the README
    python -m bench.serve --eager               # with --enforce-eager
    python -m bench.serve --schedule fixed --concurrency 1 --rounds 9

Starts unmodified ``vllm serve`` for each contestant (bench.baselines), and drives one at a time
with the real ``vllm bench serve``, on questions of the task suite and on random tokens, at several
concurrencies and request rates. Each round begins with another contestant, so that a machine that
gets slower or faster meanwhile does so to all. The other servers are up and idle; the processor
time that they use is reported.

Before anything is timed, each server must answer with HTTP 200 and exactly the number of tokens
asked for, and two equal seeded requests equally (the built-in refuses a seed); otherwise there is
no table. A run that is wrong (incomplete, of another length, of another number of denoise steps on
the fixed schedule, or with fewer right answers than chance allows, bench.workloads) has no speed.

Schedules:

    adaptive  the checkpoint's generation_config.json, in which blocks stop when they converge
    fixed     every block takes --steps denoise steps: ``max_denoising_steps`` = --steps and
              ``confidence_threshold`` = 0. Its answers are counted but hardly judged (one must be
              right): the model card speaks of the adaptive schedule.

Written to --results: serve_MODE.csv (one row a run), and on the adaptive schedule serve_facts.csv
(what each server refuses) and answers.csv (denoise steps and right answers by family).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import families
from bench.baselines import BUILTIN_WIDE, Baselines, facts
from bench.client import Client
from bench.command import add_serve_flags, canvas_length, reporting_failures
from bench.context import RESULTS, progress, provenance, write_csv
from bench.measure import AUTOREGRESSIVE, BUILTIN, OURS, REFERENCE, Measurement
from bench.race import Contestant, Race, admit, start_all
from bench.report import csv_rows, tables
from bench.workloads import ADAPTIVE, FIXED, QUESTIONS, RANDOM, Shape, Workload

SCHEDULES = (ADAPTIVE, FIXED)
CONTESTANTS = (OURS, BUILTIN, BUILTIN_WIDE, AUTOREGRESSIVE, REFERENCE)
DEFAULT_CONTESTANTS = (OURS, BUILTIN, AUTOREGRESSIVE, REFERENCE)


@dataclass(frozen=True)
class Options:
    """The command line."""

    baselines: Baselines
    shape: Shape
    schedules: tuple[str, ...]
    is_eager: bool
    rounds: int
    num_requests: int
    concurrencies: tuple[int, ...]
    rates: tuple[float, ...]
    questions_a_family: int
    budget_s: float
    results: Path

    @property
    def mode(self) -> str:
        """``eager`` or ``compiled``, also part of the file name."""
        return "eager" if self.is_eager else "compiled"

    def workloads(self, schedule: str) -> list[Workload]:
        """Questions at every load; random tokens, which take longer, without request rates."""
        steps = self.baselines.steps if schedule == FIXED else None
        found = []
        for prompts in (QUESTIONS, RANDOM):
            at_least = self.num_requests if prompts == QUESTIONS else self.num_requests // 4
            for concurrency in self.concurrencies:
                count = max(2 * concurrency, at_least, 1)
                load = Workload(schedule, prompts, count, self.shape, concurrency)
                found.append(replace(load, steps_per_block=steps))
        if schedule == ADAPTIVE:
            found += [
                Workload(schedule, QUESTIONS, self.num_requests, self.shape, rate=rate)
                for rate in self.rates
            ]
        return found


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table per workload, write the CSV files."""
    options = parse(arguments)
    measured: list[tuple[Workload, Measurement]] = []
    path = options.results / f"serve_{options.mode}.csv"
    deadline = time.monotonic() + options.budget_s
    for index, schedule in enumerate(options.schedules):
        sizes = [len(options.workloads(other)) for other in options.schedules[index:]]
        left = (deadline - time.monotonic()) * sizes[0] / sum(sizes)
        measured += measure(options, schedule, time.monotonic() + left)
        write_csv(path, csv_rows(measured, options.mode, provenance("bench.serve")))
    print(f"\n{tables(measured)}\n\n{path}")
    is_wrong = any(one.problem for _, one in measured if one.contestant == OURS)
    return 1 if is_wrong else 0


def measure(options: Options, schedule: str, deadline: float) -> list[tuple[Workload, Measurement]]:
    """All rounds of one schedule.

    Args:
        deadline: of ``time.monotonic``; no round begins that would end later.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a server or client failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        contestants = options.baselines.contestants(schedule, folder)
        progress(f"{options.mode}, {schedule}: starting {[one.name for one in contestants]}")
        start_all([one.server for one in contestants if one.server], stack)
        served = [one for one in contestants if one.server]
        first = {one.name: admit(one, options.shape) for one in served}
        # Also the largest batch that each will see: whoever compiles for it does so now.
        found = {one.name: facts(one, options.shape) for one in served}
        if schedule == ADAPTIVE:
            write_facts(options, served, first, found)
        budget = deadline - time.monotonic()
        workloads = options.workloads(schedule)
        return Race(contestants, workloads, options.rounds, Client(folder), budget).run()


def write_facts(
    options: Options,
    served: Sequence[Contestant],
    first_request_s: dict[str, float],
    found: dict[str, dict[str, object]],
) -> None:
    """What each server refuses, and its answers by family."""
    about = provenance("bench.serve")
    rows = [
        {"contestant": one.name, "first_request_s": first_request_s[one.name]}
        | found[one.name]
        | {"mode": options.mode, **about}
        for one in served
    ]
    write_csv(options.results / "serve_facts.csv", rows)
    progress("  answers by family")
    canvas, each = options.shape.canvas_length, options.questions_a_family
    answered = [row | about for one in served for row in families.answers(one, canvas, each)]
    if answered:
        write_csv(options.results / "answers.csv", answered)


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("checkpoints/tiny-dllm"))
    parser.add_argument("--autoregressive", type=Path, default=Path("checkpoints/tiny-ar"))
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(DEFAULT_CONTESTANTS)
    )
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
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
    parser.add_argument("--questions", type=int, default=12, help="a family, for answers.csv")
    add_serve_flags(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    return checked(parser, parser.parse_args(arguments))


def checked(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Options:
    """Options, or an exit with a message."""
    length = canvas_length(parser, given.model)
    for flag, value in (("--rounds", given.rounds), ("--steps", given.steps)):
        if value < 1:
            parser.error(f"{flag} {value}; allowed: at least 1.")
    try:
        shape = Shape(length, given.input_len, given.output_len)
    except ValueError as error:
        parser.error(str(error))
    autoregressive = given.autoregressive
    if AUTOREGRESSIVE in given.contestants and not (autoregressive / "config.json").exists():
        progress(f"{autoregressive} is not there: no column of {AUTOREGRESSIVE}")
        autoregressive = None
    flags = (*given.serve_flags, *(("--enforce-eager",) if given.eager else ()))
    return Options(
        baselines=Baselines(
            given.model, autoregressive, given.steps, flags, tuple(given.contestants)
        ),
        shape=shape,
        schedules=tuple(given.schedule),
        is_eager=given.eager,
        rounds=given.rounds,
        num_requests=given.num_requests,
        concurrencies=tuple(given.concurrency),
        rates=tuple(given.rates),
        questions_a_family=given.questions,
        budget_s=60 * given.minutes,
        results=given.results,
    )


if __name__ == "__main__":
    sys.exit(main())
