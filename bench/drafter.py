"""Drafting beside plain decoding: our drafter, the policies that choose widths, and vLLM's own.

    python -m bench.drafter                                  # tiny-ar, and its deeper copy
    python -m bench.drafter --target TARGET --drafter DRAFTER --pilot runs/pilot --file NAME.csv

Servers of each target:

    plain              without a drafter
    plain, in process  the same in the engine's process, where our worker runs: the part of a gain
                       that is not drafting's
    fixed N            our drafter; drafts and verifies N tokens
    adaptive, pilot    our drafter with these policies (with --pilot)
    adaptive, lookup   the same with drafts from the request's own text (``prompt_lookup``)
    n-gram             vLLM's own (DLLM_DISABLE=1), in the engine's process as well: drafts what
                       stood behind the same tokens before
    draft model        vLLM's own, likewise: a small autoregressive model drafts. That of tiny-ar is
                       made of its first layers; --draft-model names another

The target ``inflated`` is a deeper copy of tiny-ar: same answers, steps as expensive beside a draft
pass as an 8B model's (``with_layers``). They take turns on the same held-out questions, greedily,
as in ``bench.serve``; another model than ours is asked --prompts, by default the shipped ones.
Written to --results: drafter.csv (--file), one row a run.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.context import ROOT, Row, Rows, command_line, publish, read_csv, reporting_failures
from bench.race import Contestant, add_options, admit, race_workloads, rounds, start_all
from bench.runs import NO_CANVAS, Client
from bench.servers import BUILTIN_ENVIRONMENT, Server
from bench.tables import grouped, markdown, middle, names_of, of, problems, ratios
from bench.workloads import ADAPTIVE, MIXED, Shape, Workload, prompt_texts
from dllm.patches.contract import IN_PROCESS_EXECUTOR
from dllm.settings.command import CommandError
from dllm.tasks.suite import FAMILIES
from dllm.train.drafter.prompts import default_file

FILE = "drafter.csv"
TARGET, DRAFTER = ROOT / "checkpoints/tiny-ar", ROOT / "checkpoints/tiny-drafter"
PLAIN, IN_PROCESS = "plain", "plain, in process"
SHOWN = [(MIXED, "1"), ("schema", "1")]  # questions, and how many at once
SPEED_NOTE = (
    f'Ratios of tokens/s in the same round: median [min .. max]; in parentheses to "{IN_PROCESS}"; '
    "behind the dot, tokens per step that verified drafts."
)
INFLATED = "inflated"
LAYERS = 41  # of the deeper copy
# Not a temporary folder: vLLM finds what it compiled by the model's path.
MADE = ROOT / "build/bench"
MEASURED = ["schema", "extract", "report", "compare"]  # long answers, and the shortest
SHAPE = Shape(canvas_length=1, input_len=32, output_len=32)  # of the request that admits a server
# vLLM's documentation drafts 5 tokens in its examples, too.
STOCK_DRAFTS = 5
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
DRAFT_MODEL_LAYERS = 4  # of tiny-ar's 5; it agrees with the whole in 7 of 10 tokens


class Pair(NamedTuple):
    """A target, the drafter made for it, and vLLM's draft model, if there is one."""

    name: str
    target: Path
    drafter: Path
    draft_model: Path | None


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the CSV after each load."""
    options = parse(arguments)
    path = options.results / options.file
    rows: list[Row] = []
    for pair in pairs(options, MADE):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
            everybody = contestants(options, pair, folder)
            racing = [one for one in everybody if one.name not in options.without]
            ready = partial(admit, shape=SHAPE, at_once=max(options.concurrency))
            start_all(racing, ready, stack)
            asked = loads(options, pair.target)
            turns = rounds(options.rounds, 60 * options.minutes / len(options.target))
            here: list[Row] = []
            for found in race_workloads(Client(folder), racing, asked, turns):
                here = [{"target": pair.name} | row for row in found]
                publish(path, [*rows, *here])
        rows += here
    print(f"{tables(read_csv(path))}\n\n{path}")
    return int(any(row["problem"] for row in rows))


def loads(options: argparse.Namespace, target: Path) -> list[Workload]:
    """Questions of all families in turn at every concurrency; each family alone at the first.

    Raises:
        CommandError: there is no such family.
    """
    file = options.prompts or default_file(target)
    known = tuple(FAMILIES if file is None else prompt_texts(file))
    alone = (MEASURED if file is None else ()) if options.families is None else options.families
    if unknown := set(alone) - set(known):
        raise CommandError(f"--families {', '.join(unknown)}; allowed: {', '.join(known)}.")
    first, *_ = options.concurrency
    asked = [(known, n) for n in options.concurrency] + [((one,), first) for one in alone]
    return [
        Workload(ADAPTIVE, max(options.num_requests, 2 * n), SHAPE, n, families=names, prompts=file)
        for names, n in asked
    ]


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
        environment = BUILTIN_ENVIRONMENT if is_stock else {}
        log, flags = folder / f"{len(found)}.log", (*options.serve_flags, *flags)
        server = Server(name, str(pair.target), log, flags, environment)
        greedy = "--temperature", "0"
        found.append(Contestant(name, server, NO_CANVAS, greedy, takes_seeds=False))

    in_process = "--distributed-executor-backend", IN_PROCESS_EXECUTOR
    add(PLAIN)
    add(IN_PROCESS, *in_process)
    drafter = {"method": "dflash", "model": str(pair.drafter)}
    for num_drafts in options.widths:
        add(f"fixed {num_drafts}", *speculate(num_drafts, drafter))
    policies: dict[str, dict[str, Any]] = {"adaptive": {"policy": "adaptive"}}
    policies["adaptive, lookup"] = {"policy": "adaptive", "prompt_lookup": True}
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


def speculate(num_drafts: int, speculative: dict[str, Any]) -> tuple[str, ...]:
    """The flags of a server that drafts."""
    full = {**speculative, "num_speculative_tokens": num_drafts}
    return "--speculative-config", json.dumps(full)


# --- copies with more or fewer layers ------------------------------------------------------------

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def write_target(out: Path, num_layers: int) -> Path:
    """Write tiny-ar with so many layers to ``out``; fewer than it has are its first ones."""
    config = json.loads((TARGET / "config.json").read_text())
    weights = load_file(TARGET / "model.safetensors")
    shutil.copytree(TARGET, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))
    changed = with_layers(weights, config["num_hidden_layers"], num_layers)
    save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return out


def write_drafter(out: Path, num_layers: int) -> Path:
    """Write the drafter to ``out``; its config names the same layers by their new places."""
    config = json.loads((DRAFTER / "config.json").read_text())
    added, dflash = num_layers - config["num_target_layers"], config["dflash_config"]
    dflash["target_layer_ids"] = [layer + added for layer in dflash["target_layer_ids"]]
    shutil.copytree(DRAFTER, out, dirs_exist_ok=True)
    (out / "config.json").write_text(json.dumps(config | {"num_target_layers": num_layers}))
    return out


def with_layers(
    weights: dict[str, torch.Tensor], num_present: int, num_layers: int
) -> dict[str, torch.Tensor]:
    """The original layers, in front of them copies that add zero to the residual stream.

    A step of tiny-ar costs about as much as a pass of its drafter. With Qwen3-8B and its drafter it
    costs 4.5 times as much, because at batch 1 both take as long as their weights take to read:
    those of 36 layers and the head, and those of 5 layers, `fc` and the head. On an AMD EPYC 41
    layers give about this ratio. What is added has zeros in ``o_proj`` and ``down_proj`` only, so
    that no work can be left out. It stands in front, where an embedding has the model's precision:
    behind a layer vLLM normalizes a sum before it is rounded, and logits would change in bf16.
    """
    added = max(0, num_layers - num_present)
    found = {name: one for name, one in weights.items() if not LAYER.match(name)}
    for name, one in weights.items():
        if not (match := LAYER.match(name)) or int(match[1]) >= num_layers:
            continue
        layer = int(match[1])
        found[LAYER.sub(f"model.layers.{added + layer}.", name)] = one
        writes = any(part in name for part in ("o_proj", "down_proj"))
        for index in range(layer, added, num_present):
            copied = torch.zeros_like(one) if writes else one.clone()
            found[LAYER.sub(f"model.layers.{index}.", name)] = copied
    return found


# --- command line and tables ---------------------------------------------------------------------


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
    parser.add_argument("--prompts", type=Path, help="JSONL, with domains; default: see above")
    parser.add_argument("--without", nargs="*", default=[], help="names of servers to leave out")
    parser.add_argument("--families", nargs="*", help="measured alone, too; of a file: domains")
    parser.add_argument("--file", default=FILE, help="name of the CSV file")
    add_options(parser, rounds=3, minutes=14, num_requests=32, concurrency=[1, 8, 32])
    given = parser.parse_args(arguments)
    for model in (*(one for one in given.target if one != INFLATED), given.drafter):
        if not (model / "config.json").exists():
            parser.error(f"{model}: no config.json there; give a checkpoint's folder.")
    return given


def tables(rows: Rows) -> str:
    """A line for each load: tokens/s of plain decoding, of the others their ratio to it.

    Then what was wrong.
    """
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
    return "\n\n".join([table, SPEED_NOTE, *problems(rows)])


def some_tables(rows: Rows) -> str:
    """``tables`` of the loads that docs/drafter.md shows; the CSV file has the rest."""
    return tables([row for row in rows if (row["family"], row["concurrency"]) in SHOWN])


if __name__ == "__main__":
    sys.exit(main())
