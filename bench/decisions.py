"""Typed decisions a second through ``/v1/systemone``, beside vLLM's built-in and a causal model.

    python -m bench.decisions        # writes bench/results/decisions.csv

All servers take the same bodies in turn: one input with 1, 8 or 32 questions, and 1, 8 or 32 inputs
at once with a question each. No input comes twice. Then right answers and ECE of the same held-out
questions. The built-in reads one canvas a question, ours 4 unless its name says 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.context import (
    ROOT,
    Rows,
    command_line,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.race import in_turn
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import Table, markdown, middle, ratios, section
from dllm.tools.calibration import Decided, calibration_error
from dllm.tools.decisions import bundled

FILE = "decisions.csv"
OURS, FOUR = "ours, 1 canvas", "ours, 4 canvases"
BUILTIN, CAUSAL = "vLLM's built-in", "autoregressive"
ONE_CANVAS = ("--additional-config", json.dumps({"dllm": {"decisions": {"samples": 1}}}))
COUNTS = (1, 8, 32)
LOADS = ("one input", "own inputs")


class Measured(NamedTuple):
    """One run: questions a second, and the median latency of its HTTP requests in ms."""

    per_s: float
    p50_ms: float


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the CSV."""
    options = parse(arguments)
    model, about = str(options.model), provenance("bench.decisions")
    disabled = (("DLLM_DISABLE", "1"),)
    # The strategy for causal models needs labels of one token, which tiny-ar's own tokenizer lacks.
    # Only its speed is compared.
    causal = str(ROOT / "checkpoints/tiny-ar")
    asked = {
        OURS: ServerOptions(OURS, model, (*SERVE_FLAGS, *ONE_CANVAS)),
        BUILTIN: ServerOptions(BUILTIN, model, SERVE_FLAGS, disabled),
        FOUR: ServerOptions(FOUR, model, SERVE_FLAGS),
        CAUSAL: ServerOptions(CAUSAL, causal, (*SERVE_FLAGS, "--tokenizer", model)),
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-decisions-")))
        servers = [
            stack.enter_context(Server(given, folder / f"{place}.log"))
            for place, given in enumerate(asked.values())
        ]
        for server in servers:
            server.start()
            server.wait_until_ready()
            for load in LOADS:
                run(server, load, max(COUNTS), 2, "warm-up")
        for server in servers:
            server.pause()
        for pair in range(options.rounds):
            for load in LOADS:
                for count in COUNTS:
                    progress(f"  round {pair + 1} of {options.rounds}: {load}, {count}")
                    for server in in_turn(servers, pair):
                        server.resume()
                        found = run(server, load, count, options.repeats, f"{pair}")
                        server.pause()
                        row = {"contestant": server.options.name, "load": load, "count": count}
                        rows.append({**row, "pair": pair, **found._asdict(), "ece": None})
        for server in servers:
            server.resume()
        for server in servers[:-1]:
            rows.append(quality(server, options.questions))
    write_csv(options.results / FILE, [row | about for row in rows])
    print(markdown(table([{k: str(v) for k, v in row.items()} for row in rows])))
    return 0


def run(server: Server, load: str, count: int, repeats: int, tag: str) -> Measured:
    """Ask ``count`` questions, on one input in one body or on own inputs at once, some times."""
    latencies = []

    def timed(body: dict[str, Any]) -> None:
        start = time.monotonic()
        post(server, body)
        latencies.append(time.monotonic() - start)

    questions = {
        f"q{n}": {"type": "noul", "instructions": f"Ann has more than {n + 1}"}
        for n in range(count)
    }
    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        for turn in range(repeats):
            state = f"Ann has {turn}, round {tag}, {load} {count}."
            if load == LOADS[0]:
                timed({"state": state, "questions": questions})
            else:
                bodies = [
                    {"state": f"{state} {name}", "questions": {name: question}}
                    for name, question in questions.items()
                ]
                list(pool.map(timed, bodies))
    seconds = time.monotonic() - start
    return Measured(count * repeats / seconds, 1000 * statistics.median(latencies))


def quality(server: Server, num: int) -> dict[str, Any]:
    """Right answers and ECE of held-out questions with at most 26 options."""
    decided = []
    for line in bundled("heldout", num, 0):
        if "answer" not in line or line["name"] == "wide":
            continue
        question = line["question"]
        asked: dict[str, Any] = {"type": question["type"], "instructions": question["instructions"]}
        if question["type"] == "predicate":
            asked["type"], values = "noul", [True, False]
        elif question["type"] == "choice":
            values = [one["value"] for one in question["choices"]]
            asked["criteria"] = dict.fromkeys(values)
        else:
            values = [one["label"] for one in question["levels"]]
            asked["criteria"] = values
        answer = post(server, {"state": line["input"], "questions": {"q": asked}})["answers"]["q"]
        if question["type"] == "predicate":
            probs = [answer["noul"], 1 - answer["noul"]]
        else:
            probs = list(answer["probabilities"].values())
        right = values.index(line["answer"])
        decided.append(Decided(question["type"], probs, right, 1.0, 0.0))
    accuracy = sum(one.said == one.right for one in decided) / len(decided)
    row = {"contestant": server.options.name, "load": "right", "count": len(decided), "pair": 0}
    return {**row, "per_s": accuracy, "p50_ms": None, "ece": calibration_error(decided)}


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``/v1/systemone``.

    Raises:
        urllib.error.HTTPError: it is refused.
    """
    request = urllib.request.Request(
        f"{server.url}/v1/systemone",
        json.dumps({"model": server.options.model, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return dict(json.load(reply))


def table(rows: Rows) -> Table:
    """Ratios of questions a second beside ours with one canvas, and latencies."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = []
    for load in LOADS:
        for count in map(str, COUNTS):
            of_load = [row for row in rows if (row["load"], row["count"]) == (load, count)]
            by_name = {n: [row for row in of_load if row["contestant"] == n] for n in names}
            ours = by_name[OURS]
            speeds = [ratios(ours, by_name[name], "per_s") for name in names[1:]]
            times = [middle(by_name[name], "p50_ms", 0) for name in names]
            lines.append([f"{load}, {count}", middle(ours, "per_s", 0), *speeds, " / ".join(times)])
    for row in rows:
        if row["load"] == "right":
            text = f"{float(row['per_s']):.3f} right, ECE {float(row['ece']):.3f}"
            name = f"{row['contestant']}, {row['count']} questions"
            lines.append([name, text, *[""] * len(names)])
    heads = [f"beside {name}" for name in names[1:]]
    return ["", "ours a second", *heads, f"p50 in ms ({' / '.join(names)})"], lines


def decisions(results: Path) -> str:
    """Section of docs/decisions.md: questions a second and right answers, side by side."""
    command = "python -m bench.decisions"
    return section(results / FILE, command, lambda rows: markdown(table(rows)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message when it is wrong."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-decisions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="of a load in a round")
    parser.add_argument("--questions", type=int, default=100, help="of each family, for ECE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
