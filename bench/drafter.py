"""Drafting beside plain decoding: the same target, fixed widths, and the policies that choose.

    python -m bench.drafter                                        # everything that is there
    python -m bench.drafter --pilot runs/pilot --rounds 5 --concurrency 1 32
    python -m bench.drafter --families edit extract --no-mixed

Starts plain ``vllm serve`` of the target, one server for each fixed width (which drafts just as
many tokens), and one with the policy ``adaptive``; with --pilot also one with that pilot; and plain
decoding in the engine's process, where our worker runs: the part of a gain that is not drafting's.
They take turns on the same held-out questions, of all families mixed and of each family alone, at
every concurrency, while the others stand still; each round begins with another server. Greedy, as
the target's own generation config says, so that all give the same answers: a run with fewer right
answers than plain decoding has on the same questions, beyond chance, has no speed.

Written to --results: drafter.csv, one row a run. ``bench.readme`` puts its tables into
docs/drafter.md.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.request import urlopen

from bench.client import Client
from bench.command import add_serve_flags, reporting_failures
from bench.context import RESULTS, progress, provenance, read_csv, write_csv
from bench.drafter_report import FILE, MIXED, PLAIN, tables
from bench.measure import (
    NO_CANVAS,
    Circumstances,
    Measurement,
    measurement,
    without_speed,
)
from bench.race import Contestant, admit, in_turn, rounds, start_all, undisturbed
from bench.servers import READY_TIMEOUT_S, Server, ServerOptions
from bench.workloads import (
    ADAPTIVE,
    QUESTIONS,
    Shape,
    Workload,
    accuracy_problem,
    draw_questions,
    write_questions,
)
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.tasks.suite import FAMILIES, Question, questions
from dllm.tools.eval_server import counter

SHAPE = Shape(canvas_length=1, input_len=32, output_len=32)  # of the gate's request
# Our own counters: what was drafted, and how long it took.
DRAFTED, SECONDS = "dllm:drafted_tokens_total", "dllm:drafting_seconds_total"


# Of a measurement, those that mean something here.
MEASURED = (
    "contestant",
    "pair",
    "position",
    "num_requests",
    "output_tokens",
    "tokens_per_s",
    "ttft_ms",
    "latency_ms",
    "num_correct",
    "problem",
)


@dataclass(frozen=True)
class Load:
    """Questions of one family, or of all in turn, so many at once."""

    family: str
    concurrency: int
    num_requests: int

    def draw(self, seed: int) -> list[Question]:
        """The questions of a round."""
        if self.family == MIXED:
            return draw_questions(self.num_requests, seed)
        return questions((self.family,), "heldout", self.num_requests, seed)


@dataclass(frozen=True)
class Run:
    """One run of one server.

    Attributes:
        drafted, verified, accepted: tokens; the drafter's, those of them that the target looked
            at, and those it kept.
        verifying_steps: of single requests, so that ``acceptance_length`` is tokens per such step.
        drafting_s: seconds in the speculator.
    """

    load: Load
    measured: Measurement
    drafted: int
    verified: int
    accepted: int
    verifying_steps: int
    drafting_s: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step that verified drafts, the target's own included."""
        if not self.verifying_steps:
            return None
        return 1 + self.accepted / self.verifying_steps


@dataclass(frozen=True)
class Options:
    """The command line."""

    target: Path
    drafter: Path
    pilot: Path | None
    widths: tuple[int, ...]
    loads: tuple[Load, ...]
    rounds: int
    budget_s: float
    serve_flags: tuple[str, ...]
    results: Path


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write CSV and Markdown."""
    options = parse(arguments)
    runs = measure(options)
    about = provenance("bench.drafter")
    path = options.results / FILE
    write_csv(path, [row(run) | about for run in runs])
    print(f"{tables(read_csv(path))}\n\n{path}")
    return 1 if any(run.measured.problem for run in runs) else 0


def measure(options: Options) -> list[Run]:
    """All rounds.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a server or client failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        racing = contestants(options, folder)
        progress(f"starting {[one.name for one in racing]}")
        start_all([one.server for one in racing if one.server], stack)
        for one in racing:
            admit(one, SHAPE)
        client, runs = Client(folder), list[Run]()
        for pair in rounds(options.rounds, options.budget_s):
            for load in options.loads:
                progress(f"  round {pair + 1}: {load.family}, {load.concurrency} at once")
                turn = list[Run]()
                for position, one in enumerate(in_turn(racing, pair)):
                    with undisturbed(one.server, racing):
                        turn.append(once(one, load, client, pair, position))
                runs += as_right_as_plain(turn)
        return runs


def as_right_as_plain(turn: Sequence[Run]) -> list[Run]:
    """Runs on the same questions, without the speed of those that are right less often."""
    (plain,) = (run.measured.num_correct for run in turn if run.measured.contestant == PLAIN)
    asked = turn[0].load.num_requests
    checked = []
    for run in turn:
        correct = run.measured.num_correct
        if correct is not None and plain is not None and not run.measured.problem:
            source = "of the same questions plain decoding got right"
            problem = accuracy_problem(correct, asked, plain / asked, source)
            if problem:
                run = replace(run, measured=without_speed(run.measured, problem))
        checked.append(run)
    return checked


def contestants(options: Options, folder: Path) -> list[Contestant]:
    """Plain decoding first: what everybody is compared with."""
    widest = max(options.widths)
    executor = ("--distributed-executor-backend", IN_PROCESS_EXECUTOR)
    chosen: list[tuple[str, tuple[str, ...]]] = [(PLAIN, ()), (f"{PLAIN}, in process", executor)]
    chosen += [(f"fixed {width}", speculate(options, width, {})) for width in options.widths]
    chosen.append(("adaptive", speculate(options, widest, {"policy": "adaptive"})))
    if options.pilot is not None:
        policy = {"policy": "pilot", "pilot": str(options.pilot.resolve())}
        chosen.append(("pilot", speculate(options, widest, policy)))
    return [
        Contestant(
            name,
            options.target,
            NO_CANVAS,
            Server(
                ServerOptions(name, str(options.target), (*options.serve_flags, *flags)),
                folder / f"{name}.log",
            ),
            takes_seeds=False,
        )
        for name, flags in chosen
    ]


def speculate(options: Options, num_drafts: int, policy: dict[str, str]) -> tuple[str, ...]:
    """The flags of a server that drafts."""
    speculative = {
        "method": "dflash",
        "model": str(options.drafter),
        "num_speculative_tokens": num_drafts,
    }
    flags = ["--speculative-config", json.dumps(speculative)]
    if policy:
        flags += ["--additional-config", json.dumps({"dllm": {"drafter": policy}})]
    return tuple(flags)


def once(one: Contestant, load: Load, client: Client, pair: int, position: int) -> Run:
    """One run of ``vllm bench serve``."""
    assert one.server is not None
    asked = load.draw(pair)
    dataset = client.folder / f"{load.family}-{load.concurrency}-{pair}.json"
    write_questions(asked, dataset)
    workload = Workload(ADAPTIVE, QUESTIONS, load.num_requests, SHAPE, load.concurrency)
    before = counters(one.server)
    name = f"{one.name}-{load.family}-{load.concurrency}-{pair}".replace(" ", "_")
    flags = workload.client_flags(pair, dataset)
    saved = client.bench_serve(name, one.server.url, str(one.model), flags)
    drafted, seconds = (b - a for a, b in zip(before, counters(one.server), strict=True))
    about = Circumstances(one.name, pair, position)
    return Run(
        load,
        measurement(about, NO_CANVAS, saved, workload, asked),
        drafted=int(drafted),
        verified=saved.get("spec_decode_draft_tokens", 0),
        accepted=saved.get("spec_decode_accepted_tokens", 0),
        verifying_steps=saved.get("spec_decode_num_drafts", 0),
        drafting_s=seconds,
    )


def counters(server: Server) -> tuple[float, float]:
    """Tokens drafted and seconds spent on it, so far."""
    with urlopen(f"{server.url}/metrics", timeout=READY_TIMEOUT_S) as response:
        text = response.read().decode()
    return counter(text, DRAFTED), counter(text, SECONDS)


def row(run: Run) -> dict[str, object]:
    """Of the CSV."""
    measured = asdict(run.measured)
    return {
        "family": run.load.family,
        "concurrency": run.load.concurrency,
        **{key: measured[key] for key in MEASURED},
        "acceptance_length": run.acceptance_length,
        "drafted": run.drafted,
        "verified": run.verified,
        "accepted": run.accepted,
        "drafting_s": run.drafting_s,
    }


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=Path("checkpoints/tiny-ar"))
    parser.add_argument("--drafter", type=Path, default=Path("checkpoints/tiny-drafter"))
    parser.add_argument("--pilot", type=Path, help="folder that `dllm train pilot` wrote")
    parser.add_argument("--widths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--no-mixed", action="store_true", help="families on their own only")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-requests", type=int, default=96, help="of a run, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30, help="no round begins that ends later")
    add_serve_flags(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    for model in (given.target, given.drafter):
        if not (model / "config.json").exists():
            parser.error(f"{model}: no config.json there; give a checkpoint's folder.")
    families = [*([] if given.no_mixed else [MIXED]), *given.families]
    return Options(
        target=given.target,
        drafter=given.drafter,
        pilot=given.pilot,
        widths=tuple(given.widths),
        loads=tuple(
            Load(family, concurrency, max(given.num_requests, 2 * concurrency))
            for family in families
            for concurrency in given.concurrency
        ),
        rounds=given.rounds,
        budget_s=60 * given.minutes,
        serve_flags=tuple(given.serve_flags),
        results=given.results,
    )


if __name__ == "__main__":
    sys.exit(main())
