"""Drafting beside plain decoding: our drafter, the policies that choose widths, and vLLM's own.

    python -m bench.drafter                                  # tiny-ar, and its deeper copy
    python -m bench.drafter --pilot runs/pilot --rounds 5 --families edit extract
    python -m bench.drafter --target TARGET --drafter DRAFTER

For each target, starts ``vllm serve`` for each of these:

    plain              without a drafter
    plain, in process  the same in the engine's process, where our worker runs: the part of a gain
                       that is not drafting's
    fixed N            our drafter; drafts and verifies N tokens
    adaptive, pilot    our drafter with these policies (with --pilot)
    n-gram             vLLM's own (DLLM_DISABLE=1), in the engine's process as well: drafts what
                       stood behind the same tokens before
    draft model        likewise, token by token (--draft-model; for tiny-ar its own first layers)

The target ``inflated`` is a deeper copy of tiny-ar: same answers, steps as expensive beside a draft
pass as an 8B model's (``bench.inflate``).

They take turns on the same held-out questions, while the others stand still; each round begins with
another server. Greedy, as the target's own generation config says, so that all give the same
answers: a run with fewer right answers than plain decoding has on the same questions, beyond
chance, has no speed.

Written to --results: drafter.csv, one row a run; docs/drafter.md has a part of it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.client import Client
from bench.context import (
    ROOT,
    Rows,
    as_text,
    command_line,
    provenance,
    read_csv,
    reporting_failures,
    write_csv,
)
from bench.inflate import DRAFTER, LAYERS, TARGET, num_layers_of, write_drafter, write_target
from bench.measure import NO_CANVAS, csv_rows, without_speed
from bench.race import Contestant, Measured, Race, start_in_turn
from bench.serve import add_serve_flags
from bench.servers import Server, ServerOptions
from bench.tables import Table, markdown, measured_with, middle, names_of, of, problems, ratios
from bench.workloads import ADAPTIVE, MIXED, Shape, Workload, accuracy_problem
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.tasks.suite import FAMILIES

FILE = "drafter.csv"
PLAIN, IN_PROCESS = "plain", "plain, in process"
SHOWN = [(MIXED, "1"), ("schema", "1")]  # in docs/drafter.md; the CSV file has the rest
SPEED_NOTE = (
    f'Ratios of tokens/s in the same round: median [min .. max]; in parentheses to "{IN_PROCESS}"; '
    "behind the dot, tokens per step that verified drafts."
)
INFLATED = "inflated"
# Not a temporary folder: vLLM finds what it compiled by the model's path.
MADE = ROOT / "build/bench"
MEASURED = ["schema", "extract", "report", "compare"]  # long answers, and the shortest
SHAPE = Shape(canvas_length=1, input_len=32, output_len=32)  # of the request that admits a server
# vLLM's documentation drafts 5 tokens in its examples, too.
STOCK_DRAFTS = 5
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
DRAFT_MODEL_LAYERS = 4  # of tiny-ar's 5; it agrees with the whole in 7 of 10 tokens


@dataclass(frozen=True)
class Pair:
    """A target, the drafter made for it, and vLLM's draft model, if there is one."""

    name: str
    target: Path
    drafter: Path
    draft_model: Path | None


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the CSV after each load."""
    options = parse(arguments)
    about = provenance("bench.drafter")
    path = options.results / FILE
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="dllm-bench-") as folder:
        for pair in pairs(options, MADE):

            def save(so_far: Measured, pair: Pair = pair) -> None:
                write_csv(path, [*rows, *rows_of(pair, so_far, about)])

            measured = measure(options, pair, Path(folder) / pair.name, save)
            rows.extend(rows_of(pair, measured, about))
    found = as_text(rows)
    print(f"{sections(found)}\n\n{path}")
    return 1 if any(row["problem"] for row in found) else 0


def measure(
    options: argparse.Namespace, pair: Pair, folder: Path, save: Callable[[Measured], None]
) -> Measured:
    """All rounds with a pair; ``save`` gets what was measured so far, after each load."""
    folder.mkdir(exist_ok=True)
    racing = contestants(options, pair, folder)
    with ExitStack() as stack:
        start_in_turn(racing, SHAPE, max(options.concurrency), stack)
        budget_s = 60 * options.minutes / len(options.target)
        return Race(racing, loads(options), options.rounds, Client(folder), budget_s).run(save)


def rows_of(pair: Pair, measured: Measured, about: dict[str, str]) -> list[dict[str, object]]:
    """A row for each run: the pair, numbers, provenance."""
    target = {"target": pair.name, "layers": num_layers_of(pair.target)}
    checked = as_right_as_plain(measured)
    rows = zip(checked, csv_rows(checked, about), strict=True)
    return [target | {"family": load.family} | row for (load, _), row in rows]


def loads(options: argparse.Namespace) -> list[Workload]:
    """Questions of all families in turn at every concurrency; each family alone at the first."""
    first, *_ = options.concurrency
    asked = [(tuple(FAMILIES), n) for n in options.concurrency]
    asked += [((family,), first) for family in options.families]
    return [
        Workload(ADAPTIVE, max(options.num_requests, 2 * n), SHAPE, n, families=families)
        for families, n in asked
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


# --- who is measured -----------------------------------------------------------------------------


def pairs(options: argparse.Namespace, folder: Path) -> Iterator[Pair]:
    """The targets; what has to be made for them is written into the folder."""
    for given in options.target:
        draft_model = options.draft_model
        if draft_model is None and given in (INFLATED, TARGET):
            draft_model = write_target(folder / "draft-model", DRAFT_MODEL_LAYERS)
        if given == INFLATED:
            target = write_target(folder / INFLATED, LAYERS)
            drafter = write_drafter(folder / f"{INFLATED}-drafter", LAYERS)
            yield Pair(INFLATED, target, drafter, draft_model)
        else:
            yield Pair(given.name, given, options.drafter, draft_model)


def contestants(options: argparse.Namespace, pair: Pair, folder: Path) -> list[Contestant]:
    """Plain decoding first: what everybody is compared with. No server is started."""
    found: list[Contestant] = []

    def add(name: str, *flags: str, is_stock: bool = False) -> None:
        environment = (("DLLM_DISABLE", "1"),) if is_stock else ()
        flags = (*options.serve_flags, *flags)
        served = ServerOptions(name, str(pair.target), flags, environment)
        server = Server(served, folder / f"{len(found)}.log")
        found.append(Contestant(name, pair.target, NO_CANVAS, server, takes_seeds=False))

    in_process = "--distributed-executor-backend", IN_PROCESS_EXECUTOR
    add(PLAIN)
    add(IN_PROCESS, *in_process)
    drafter = {"method": "dflash", "model": str(pair.drafter)}
    for num_drafts in options.widths:
        add(f"fixed {num_drafts}", *speculate(num_drafts, drafter))
    policies = {"adaptive": {"policy": "adaptive"}}
    if options.pilot is not None:
        policies["pilot"] = {"policy": "pilot", "pilot": str(options.pilot.resolve())}
    for name, policy in policies.items():
        chosen = "--additional-config", json.dumps({"dllm": {"drafter": policy}})
        add(name, *speculate(max(options.widths), drafter), *chosen)
    add("n-gram", *in_process, *speculate(STOCK_DRAFTS, NGRAM), is_stock=True)
    if pair.draft_model is not None:
        model = {"method": "draft_model", "model": str(pair.draft_model)}
        add("draft model", *in_process, *speculate(STOCK_DRAFTS, model), is_stock=True)
    return found


def speculate(num_drafts: int, speculative: Mapping[str, object]) -> tuple[str, ...]:
    """The flags of a server that drafts."""
    full = {**speculative, "num_speculative_tokens": num_drafts}
    return "--speculative-config", json.dumps(full)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--target",
        nargs="+",
        type=lambda text: text if text == INFLATED else Path(text).resolve(),
        default=[TARGET, INFLATED],
        help=f"folders of checkpoints, or {INFLATED!r}",
    )
    parser.add_argument("--drafter", type=Path, default=DRAFTER, help="for targets with a folder")
    parser.add_argument("--pilot", type=Path, help="folder that `dllm train pilot` wrote")
    parser.add_argument("--draft-model", type=Path, help="folder of an autoregressive checkpoint")
    parser.add_argument("--widths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=MEASURED)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-requests", type=int, default=32, help="of a run, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=14, help="no round begins that ends later; without starts"
    )
    add_serve_flags(parser)
    given = parser.parse_args(arguments)
    for model in (*(one for one in given.target if one != INFLATED), given.drafter):
        if not (model / "config.json").exists():
            parser.error(f"{model}: no config.json there; give a checkpoint's folder.")
    return given


# --- tables --------------------------------------------------------------------------------------


def drafting(results: Path) -> str:
    """Section of docs/drafter.md."""
    rows = read_csv(results / FILE)
    if not rows:
        return "Not measured yet: `python -m bench.drafter`."
    shown = [row for row in rows if (row["family"], row["concurrency"]) in SHOWN]
    return f"{sections(shown)}\n\n{measured_with(rows, FILE)}"


def sections(rows: Rows) -> str:
    """Speeds, and what was wrong."""
    return "\n\n".join([markdown(speeds(rows)), SPEED_NOTE, *problems(rows)])


def speeds(rows: Rows) -> Table:
    """A line for each load: tokens/s of plain decoding, and of the others their ratio to it."""
    others = [name for name in names_of(rows) if name != PLAIN]
    lines = []
    for load in dict.fromkeys((row["target"], row["family"], row["concurrency"]) for row in rows):
        here = [row for row in rows if (row["target"], row["family"], row["concurrency"]) == load]
        plain, in_process = of(here, PLAIN), of(here, IN_PROCESS)
        cells = [*load, middle(plain, "tokens_per_s", 0)]
        for name in others:
            own = of(here, name)
            cell = ratios(own, plain, "tokens_per_s")
            if name != IN_PROCESS and (beside := ratios(own, in_process, "tokens_per_s")) != "-":
                cell += f" ({beside.split(' ')[0]})"
            if (length := middle(own, "acceptance_length")) != "-":
                cell += f" · {length}"
            cells.append(cell)
        lines.append(cells)
    header = ["target", "questions", "at once", "plain, tokens/s"]
    return [*header, *(f"{one} / plain" for one in others)], lines


if __name__ == "__main__":
    sys.exit(main())
