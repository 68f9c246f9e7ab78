"""Steps of real processes beside what `dllm plan` says of them.

    python -m bench.plan_steps [--rounds 3] [--requests 12]

The target is tiny-ar with a pause of VERIFY_MS in each step, so that it takes as long as a large
model; its draft worker is a process that knows the answers and takes DRAFT_MS for a draft. The plan
gets the time of a step without drafts, which is measured, DRAFT_MS, and ROUND_TRIP_MS for a message
and its reply over loopback, and says how long a step with K drafts takes. Steps that read a prompt
or end a request are left out.

Writes one row a round, load and width: milliseconds of a step, planned and measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.context import (
    RESULTS,
    GateError,
    Rows,
    as_text,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.remote import (
    KNOWN,
    KNOWN_AHEAD,
    PLAIN,
    Contestant,
    Target,
    Worker,
    prompts,
)
from bench.tables import Spread, Table, markdown, section
from dllm.remote.plan import Drafts, Grid, Targets, constant, plan

FILE = "plan_steps.csv"
VERIFY_MS, DRAFT_MS, DEADLINE_MS, ROUND_TRIP_MS = 60.0, 6.0, 1000.0, 0.1
MOST = 8  # drafts
WIDTHS = (2, 4, 8)


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    given = parser.parse_args(arguments)
    about = provenance("bench.plan_steps")
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = Target(MOST, max(given.at_once), DEADLINE_MS)
        pause_steps(target)
        asked = prompts(given.requests)
        with target.drafted_by(Contestant(PLAIN, None, 0), None):
            answers, _ = steps(target, asked, max(given.at_once))
        (folder / "texts.json").write_text(
            json.dumps([prompt + answer for prompt, answer in zip(asked, answers, strict=True)])
        )
        workers = {}
        for name, ahead in ((KNOWN, 0), (KNOWN_AHEAD, MOST + 1)):
            command = [sys.executable, "-m", "bench.known_drafts", str(folder / "texts.json")]
            workers[name] = Worker(
                [*command, str(ahead), str(DRAFT_MS / 1e3)], folder / f"{name}.log"
            )
            stack.callback(workers[name].end)
        for pair in range(given.rounds):
            for at_once in given.at_once:
                rows += measure(target, workers, asked, answers, at_once, pair)
            progress(f"round {pair + 1} of {given.rounds}")
    write_csv(given.results / FILE, [row | about for row in rows])
    print(markdown(table(as_text(rows))))
    return 0


def pause_steps(target: Target) -> None:
    """Let each step of the target's model take VERIFY_MS longer."""
    core: Any = target.llm.llm_engine.engine_core
    executor = core.engine_core.model_executor
    execute = executor.execute_model

    def slower(*given: Any, **options: Any) -> Any:
        time.sleep(VERIFY_MS / 1e3)
        return execute(*given, **options)

    executor.execute_model = slower


def measure(
    target: Target,
    workers: dict[str, Worker],
    asked: Sequence[list[int]],
    answers: list[list[int]],
    at_once: int,
    pair: int,
) -> list[dict[str, object]]:
    """Rows of one load: plain decoding first, from which the others are planned.

    Raises:
        GateError: the answers are not those of plain decoding.
    """
    with target.drafted_by(Contestant(PLAIN, None, 0), None):
        _, plain = steps(target, asked, at_once)
    found: list[dict[str, object]] = []
    for name, worker in workers.items():
        for width in WIDTHS:
            with target.drafted_by(Contestant(name, name, width), worker.address):
                got, times = steps(target, asked, at_once)
            if got != answers:
                raise GateError(f"{name}, {width}: answers differ from plain decoding's")
            found.append(
                {
                    "drafts": name,
                    "concurrency": at_once,
                    "width": width,
                    "pair": pair,
                    "planned_ms": planned(statistics.mean(plain), width, name == KNOWN_AHEAD),
                    "measured_ms": statistics.mean(times),
                }
            )
    return found


def planned(plain_ms: float, width: int, ahead: bool) -> float:
    """What the plan says of a step, in ms; every draft is kept."""

    def flat(ms: float) -> Grid:
        return Grid((1.0,), (0.0, float(MOST)), np.full((1, 2), ms))

    drafts = Drafts(1, flat(DRAFT_MS), constant(1.0, MOST), ahead=ahead)
    return plan(Targets(1, 1, flat(plain_ms)), drafts, ROUND_TRIP_MS)[width].step_ms


def steps(
    target: Target, asked: Sequence[list[int]], at_once: int
) -> tuple[list[list[int]], list[float]]:
    """Answers, and the milliseconds of each step in which nobody read a prompt or was finished."""
    answers: dict[int, list[int]] = {}
    times = [
        1e3 * step.seconds
        for step in target.steps(asked, at_once, answers)
        if not step.num_begun and not step.num_ended
    ]
    return [answers[number] for number in range(len(asked))], times


# --- table ---------------------------------------------------------------------------------------


def table(rows: Rows) -> Table:
    """One line a load, worker and width: both times, and by how much they differ."""
    lines = []
    for key in dict.fromkeys((r["concurrency"], r["drafts"], r["width"]) for r in rows):
        own = [r for r in rows if (r["concurrency"], r["drafts"], r["width"]) == key]
        pairs = [(float(r["planned_ms"]), float(r["measured_ms"])) for r in own]
        lines.append(
            [
                f"{key[0]} at once",
                f"{key[1]}, K = {key[2]}",
                Spread.of([plan_ms for plan_ms, _ in pairs]).text(1),
                Spread.of([ms for _, ms in pairs]).text(1),
                Spread.of([100 * (ms / plan_ms - 1) for plan_ms, ms in pairs]).text(1),
            ]
        )
    return ["", "drafts", "planned, ms a step", "measured", "difference, %"], lines


def planned_steps(results: Path) -> str:
    """Section of docs/planning.md: the plan beside real steps."""
    return section(results / FILE, "python -m bench.plan_steps", lambda rows: markdown(table(rows)))


if __name__ == "__main__":
    sys.exit(main())
