"""Typed decisions a second through ``/v1/systemone``, beside vLLM's built-in and a causal model.

    python -m bench.decisions        # writes bench/results/decisions.csv

All servers take the same bodies in turn: one input with 1, 8 or 32 questions, and 1, 8 or 32 inputs
at once with a question each. No input comes twice. The built-in reads one canvas a question, ours 4
unless its name says 1.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench.context import ROOT, Row, Rows, command_line, publish, reporting_failures
from bench.race import Contestant, race, rounds, start_all
from bench.servers import BUILTIN_ENVIRONMENT, SERVE_FLAGS, Server
from bench.tables import Section, grouped, markdown, middle, names_of, of, ratios

OURS, FOUR = "ours, 1 canvas", "ours, 4 canvases"
BUILTIN, CAUSAL = "vLLM's built-in", "autoregressive"
ONE_CANVAS = ("--additional-config", json.dumps({"dllm": {"decisions": {"samples": 1}}}))
COUNTS = (1, 8, 32)
ONE_INPUT, OWN_INPUTS = "one input", "own inputs"
PATH = "/v1/systemone"


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-decisions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="of a load in a round")
    options = parser.parse_args(arguments)
    path = options.results / SECTION.file
    loads = list(product((ONE_INPUT, OWN_INPUTS), COUNTS))

    def run(one: Contestant, load: tuple[str, int], number: int) -> Row:
        assert one.server is not None
        kind, count = load
        found = measure(one.server, kind, count, options.repeats, f"{number}")
        return {"load": kind, "count": count, **found}

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-decisions-")))
        racing = contestants(str(options.model), folder)
        start_all(racing, warm_up, stack)
        for rows in race(racing, loads, rounds(options.rounds), run):
            publish(path, rows)
    print(SECTION(options.results))
    return 0


def contestants(model: str, folder: Path) -> list[Contestant]:
    """None of their servers is started."""
    # The strategy for causal models needs labels of one token, which tiny-ar's own tokenizer lacks.
    # Only its speed is compared.
    causal = Server(
        CAUSAL,
        str(ROOT / "checkpoints/tiny-ar"),
        folder / "3",
        (*SERVE_FLAGS, "--tokenizer", model),
    )
    servers = [
        Server(OURS, model, folder / "0", (*SERVE_FLAGS, *ONE_CANVAS)),
        Server(BUILTIN, model, folder / "1", SERVE_FLAGS, BUILTIN_ENVIRONMENT),
        Server(FOUR, model, folder / "2"),
        causal,
    ]
    return [Contestant(server.name, server) for server in servers]


def warm_up(one: Contestant) -> None:
    """Wait until a server is ready, and ask it every load: the built-in compiles at the first."""
    assert one.server is not None
    one.server.wait_until_ready()
    for load, count in product((ONE_INPUT, OWN_INPUTS), COUNTS):
        measure(one.server, load, count, 2, "warm-up")


def measure(server: Server, load: str, count: int, repeats: int, tag: str) -> Row:
    """Questions a second, on one input in one body or on own inputs at once; the median latency."""
    latencies = []

    def timed(body: dict[str, Any]) -> None:
        start = time.monotonic()
        server.post(PATH, **body)
        latencies.append(time.monotonic() - start)

    asked = {
        f"q{n}": {"type": "noul", "instructions": f"Ann has more than {n + 1}"}
        for n in range(count)
    }
    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        for turn in range(repeats):
            state = f"Ann has {turn}, round {tag}, {load} {count}."
            bodies = [{"state": f"{state} {q}", "questions": {q: asked[q]}} for q in asked]
            together = [{"state": state, "questions": asked}]
            list(pool.map(timed, together if load == ONE_INPUT else bodies))
    seconds = time.monotonic() - start
    return {"per_s": count * repeats / seconds, "p50_ms": 1000 * statistics.median(latencies)}


def table(rows: Rows) -> str:
    names, lines = names_of(rows), []
    for (load, count), here in grouped(rows, "load", "count").items():
        ours = of(here, OURS)
        speeds = [ratios(ours, of(here, name), "per_s") for name in names[1:]]
        times = " / ".join(middle(of(here, name), "p50_ms", 0) for name in names)
        lines.append([f"{load}, {count}", middle(ours, "per_s", 0), *speeds, times])
    heads = [f"beside {name}" for name in names[1:]]
    return markdown(["", "ours a second", *heads, f"p50 in ms ({' / '.join(names)})"], lines)


SECTION = Section("decisions.csv", "python -m bench.decisions", table)  # of docs/decisions.md


if __name__ == "__main__":
    sys.exit(main())
