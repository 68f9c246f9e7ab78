"""Drafting beside plain decoding: the same target, fixed widths, and the policies that choose.

    python -m bench.drafter                                        # everything that is there
    python -m bench.drafter --pilot runs/pilot --rounds 5 --concurrency 1 32
    python -m bench.drafter --families edit extract

Starts plain ``vllm serve`` of the target, one server for each fixed width (which drafts just as
many tokens), and one with the policy ``adaptive``; with --pilot also one with that pilot; and plain
decoding in the engine's process, where our worker runs: the part of a gain that is not drafting's.
They take turns on the same held-out questions, of all families mixed and of each family alone, at
every concurrency, while the others stand still; each round begins with another server. Greedy, as
the target's own generation config says, so that all give the same answers: a run with fewer right
answers than plain decoding has on the same questions, beyond chance, has no speed.

Written to --results: drafter.csv, one row a run; docs/drafter.md has a table of it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.client import Client
from bench.context import (
    RESULTS,
    Rows,
    as_text,
    provenance,
    read_csv,
    reporting_failures,
    write_csv,
)
from bench.measure import NO_CANVAS, csv_rows, without_speed
from bench.race import Contestant, Measured, Race, start_all
from bench.serve import add_serve_flags
from bench.servers import Server, ServerOptions
from bench.tables import Table, markdown, measured_with, middle, names_of, of, problems, ratios
from bench.workloads import ADAPTIVE, Shape, Workload, accuracy_problem
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.tasks.suite import FAMILIES

PLAIN = "plain"
FILE = "drafter.csv"
SHAPE = Shape(canvas_length=1, input_len=32, output_len=32)  # of the request that admits a server


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the CSV."""
    options = parse(arguments)
    about = provenance("bench.drafter")
    path = options.results / FILE

    def rows_of(measured: Measured) -> list[dict[str, object]]:
        rows = csv_rows(as_right_as_plain(measured), about)
        return [
            {"family": load.family} | row for (load, _), row in zip(measured, rows, strict=True)
        ]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        racing = contestants(options, folder)
        start_all(racing, SHAPE, max(options.concurrency), stack)
        race = Race(racing, loads(options), options.rounds, Client(folder), 60 * options.minutes)
        rows = as_text(rows_of(race.run(lambda so_far: write_csv(path, rows_of(so_far)))))
    print("\n\n".join([markdown(table(rows)), *problems(rows), str(path)]))
    return 1 if any(row["problem"] for row in rows) else 0


def loads(options: argparse.Namespace) -> list[Workload]:
    """Questions of all families in turn, then of each alone; each at every concurrency."""
    return [
        Workload(ADAPTIVE, max(options.num_requests, 2 * n), SHAPE, n, families=families)
        for families in (tuple(FAMILIES), *((family,) for family in options.families))
        for n in options.concurrency
    ]


def as_right_as_plain(measured: Measured) -> Measured:
    """The same runs, without the speed of those that are right less often than plain decoding."""
    plain = {(load, one.pair): one.num_correct for load, one in measured if one.contestant == PLAIN}
    checked: Measured = []
    for load, one in measured:
        right, source = plain[load, one.pair], "of the same questions plain decoding got right"
        if one.num_correct is not None and right is not None and not one.problem:
            share = right / one.num_requests
            problem = accuracy_problem(one.num_correct, one.num_requests, share, source)
            one = without_speed(one, problem) if problem else one
        checked.append((load, one))
    return checked


def contestants(options: argparse.Namespace, folder: Path) -> list[Contestant]:
    """Plain decoding first: what everybody is compared with."""
    widest = max(options.widths)
    executor = ("--distributed-executor-backend", IN_PROCESS_EXECUTOR)
    chosen: list[tuple[str, tuple[str, ...]]] = [(PLAIN, ()), (f"{PLAIN}, in process", executor)]
    chosen += [(f"fixed {width}", speculate(options, width, {})) for width in options.widths]
    chosen.append(("adaptive", speculate(options, widest, {"policy": "adaptive"})))
    if options.pilot is not None:
        policy = {"policy": "pilot", "pilot": str(options.pilot.resolve())}
        chosen.append(("pilot", speculate(options, widest, policy)))
    found = []
    for index, (name, flags) in enumerate(chosen):
        served = ServerOptions(name, str(options.target), (*options.serve_flags, *flags))
        server = Server(served, folder / f"{index}.log")
        found.append(Contestant(name, options.target, NO_CANVAS, server, takes_seeds=False))
    return found


def speculate(
    options: argparse.Namespace, num_drafts: int, policy: dict[str, str]
) -> tuple[str, ...]:
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


# --- tables --------------------------------------------------------------------------------------


def table(rows: Rows) -> Table:
    """A line for each load: tokens/s of plain decoding, and of the others their ratio to it."""
    others = [name for name in names_of(rows) if name != PLAIN]
    lines = []
    for load in dict.fromkeys((row["family"], row["concurrency"]) for row in rows):
        here = [row for row in rows if (row["family"], row["concurrency"]) == load]
        plain = of(here, PLAIN)
        cells = [*load, middle(plain, "tokens_per_s", 0)]
        for name in others:
            own = of(here, name)
            length = middle(own, "acceptance_length")
            cells.append(ratios(own, plain, "tokens_per_s") + (f" · {length}" * (length != "-")))
        lines.append(cells)
    return ["questions", "at once", "plain, tokens/s", *(f"{one} / plain" for one in others)], lines


def drafting(results: Path) -> str:
    """Section of docs/drafter.md."""
    rows = read_csv(results / FILE)
    if not rows:
        return "Not measured yet: `python -m bench.drafter`."
    note = (
        "Ratios of tokens/s in the same round: median [min .. max]; behind the dot, tokens per "
        "step that verified drafts."
    )
    return "\n\n".join([markdown(table(rows)), note, *problems(rows), measured_with(rows, FILE)])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=Path("checkpoints/tiny-ar"))
    parser.add_argument("--drafter", type=Path, default=Path("checkpoints/tiny-drafter"))
    parser.add_argument("--pilot", type=Path, help="folder that `dllm train pilot` wrote")
    parser.add_argument("--widths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
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
    return given


if __name__ == "__main__":
    sys.exit(main())
