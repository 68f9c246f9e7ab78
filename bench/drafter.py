"""Drafting beside plain decoding: our drafter, the policies that choose widths, and vLLM's own.

    python -m bench.drafter                                  # tiny-ar
    python -m bench.drafter --target TARGET --drafter DRAFTER --file NAME.csv

Servers of the target:

    plain              without a drafter
    plain, in process  the same in the engine's process, where our worker runs: the part of a gain
                       that is not drafting's
    fixed N            our drafter; drafts and verifies N tokens
    fixed N, S passes  the same with several passes over a block (--passes 2 4)
    pilot              our drafter with a pilot's widths (--pilot FILE)
    adaptive           our drafter with this policy
    adaptive, lookup   the same with drafts from the request's own text (``prompt_lookup``)
    lookup             these drafts alone, without a drafter
    draft model        a small model beside the target (--draft-model FOLDER): fixed 5
    draft model, adaptive    the same with the policy adaptive; the small model runs in every step,
                       also if nothing is drafted
    itself             the target with an adapter (--adapter FOLDER N): fixed N
    n-gram             vLLM's own (DLLM_DISABLE=1), in the engine's process as well: drafts what
                       stood behind the same tokens before

Taking turns as in ``bench.serve``, greedily, on held-out questions; another model than ours is
asked --prompts, by default the bundled ones. Written to --results: --file, one row a run.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.context import ROOT, Row, Rows, command_line, publish, read_csv, reporting_failures
from bench.race import Contestant, add_options, admit, race_workloads, rounds, start_all
from bench.runs import ADAPTIVE, NO_CANVAS, Shape, Workload
from bench.servers import BUILTIN_ENVIRONMENT, Server
from bench.tables import grouped, markdown, middle, names_of, of, problems, ratios
from bench.toys.suite import FAMILIES
from dllm.drafter.widths.pilot import PilotConfig
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.prompts.files import BUNDLED

FILE = "drafter.csv"
TARGET, DRAFTER = ROOT / "checkpoints/tiny-ar", ROOT / "checkpoints/tiny-drafter"
PLAIN, IN_PROCESS = "plain", "plain, in process"
LONG = ("schema",)  # whose answers are the longest, measured alone as well
SHAPE = Shape(canvas_length=1, input_len=32, output_len=32)  # of the request that admits a server
# vLLM's documentation drafts 5 tokens in its examples, too.
STOCK_DRAFTS = 5
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    path = options.results / options.file
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        everybody = contestants(options, folder)
        racing = [one for one in everybody if one.name not in options.without]
        start_all(racing, partial(admit, shape=SHAPE, at_once=max(options.concurrency)), stack)
        turns = rounds(options.rounds, 60 * options.minutes)
        for found in race_workloads(racing, loads(options), turns):
            rows = [{"target": options.target.name} | row for row in found]
            publish(path, rows)
    print(f"{tables(read_csv(path))}\n\n{path}")
    return int(any(row["problem"] for row in rows))


def loads(options: argparse.Namespace) -> list[Workload]:
    is_ours = options.target.parent == TARGET.parent
    file = options.prompts or (None if is_ours else BUNDLED)
    asked = [(tuple(FAMILIES), n) for n in options.concurrency]
    if file is None:
        asked.append((LONG, options.concurrency[0]))
    make = partial(Workload, ADAPTIVE, shape=SHAPE, prompts=file)
    count = options.num_requests
    return [make(max(count, 2 * n), concurrency=n, families=names) for names, n in asked]


def contestants(options: argparse.Namespace, folder: Path) -> list[Contestant]:
    """Plain decoding first: what everybody is compared with. No server is started."""
    found: list[Contestant] = []

    def add(name: str, *flags: str, is_stock: bool = False) -> None:
        environment = BUILTIN_ENVIRONMENT if is_stock else {}
        log, flags = folder / f"{len(found)}.log", (*options.serve_flags, *flags)
        server = Server(name, str(options.target), log, flags, environment)
        greedy = "--temperature", "0"
        found.append(Contestant(name, server, NO_CANVAS, greedy, takes_seeds=False))

    in_process = "--distributed-executor-backend", IN_PROCESS_EXECUTOR
    add(PLAIN)
    add(IN_PROCESS, *in_process)
    dflash = {"method": "dflash", "model": str(options.drafter)}
    adaptive: dict[str, Any] = {"policy": "adaptive"}
    lookup = adaptive | {"prompt_lookup": True}
    most, passes = max(options.widths), options.passes
    steered: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
        *((f"fixed {width}", width, dflash, {"policy": "fixed"}) for width in options.widths),
        *((f"fixed {most}, {n} passes", most, dflash, {"denoise_steps": n}) for n in passes),
    ]
    if options.pilot is not None:
        widest = PilotConfig.read(options.pilot).widths[-1]
        steered.append(("pilot", widest, dflash, {"policy": "pilot", "pilot": str(options.pilot)}))
    steered += [
        ("adaptive", most, dflash, adaptive),
        ("adaptive, lookup", most, dflash, lookup),
        ("lookup", most, {"method": "ngram"}, lookup),
    ]
    if options.draft_model is not None:
        small = {"method": "draft_model", "model": str(options.draft_model)}
        steered += [
            ("draft model", STOCK_DRAFTS, small, {"policy": "fixed"}),
            ("draft model, adaptive", STOCK_DRAFTS, small, adaptive),
        ]
    if options.adapter is not None:
        adapter, count = options.adapter
        own = {"method": "uno", "uno_lora_path": adapter}
        steered.append(("itself", int(count), own, {"policy": "fixed"}))
    for name, num_drafts, source, policy in steered:
        chosen = "--additional-config", json.dumps({"dllm": {"drafter": policy}})
        add(name, *speculate(num_drafts, source), *chosen)
    add("n-gram", *in_process, *speculate(STOCK_DRAFTS, NGRAM), is_stock=True)
    return found


def speculate(num_drafts: int, speculative: dict[str, Any]) -> tuple[str, ...]:
    full = {**speculative, "num_speculative_tokens": num_drafts}
    return "--speculative-config", json.dumps(full)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--target", type=Path, default=TARGET, help="a checkpoint's folder")
    parser.add_argument("--drafter", type=Path, default=DRAFTER, help="likewise, made for it")
    parser.add_argument("--widths", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--passes", type=int, nargs="*", default=[], help="over a block: see above")
    parser.add_argument("--pilot", type=Path, help="a file of `dllm train pilot`")
    parser.add_argument("--draft-model", type=Path, help="a checkpoint's folder, for draft_model")
    parser.add_argument("--adapter", nargs=2, metavar=("FOLDER", "N"), help="to draft for itself")
    parser.add_argument("--prompts", type=Path, help="a .jsonl file; default: see above")
    parser.add_argument("--without", nargs="*", default=[], help="names of servers to leave out")
    parser.add_argument("--file", default=FILE, help="name of the CSV file")
    add_options(parser, rounds=3, minutes=14, num_requests=32, concurrency=[1, 8, 32])
    given = parser.parse_args(arguments)
    given.target = given.target.resolve()
    for model in (given.target, given.drafter, given.draft_model):
        if model is not None and not (model / "config.json").exists():
            parser.error(f"{model}: no config.json there; give a checkpoint's folder.")
    return given


def tables(rows: Rows) -> str:
    others = [name for name in names_of(rows) if name != PLAIN]
    lines = []
    for load, here in grouped(rows, "target", "family", "concurrency").items():
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
    table = markdown([*header, *(f"{one} / plain" for one in others)], lines)
    beside = f'in parentheses to "{IN_PROCESS}"; ' if of(rows, IN_PROCESS) else ""
    note = (
        f"Ratios of tokens/s in the same round: median [min .. max]; {beside}behind the dot, "
        "tokens per step that verified drafts."
    )
    return "\n\n".join([table, note, *problems(rows)])


if __name__ == "__main__":
    sys.exit(main())
