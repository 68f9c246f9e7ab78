"""What a soak campaign recorded, its rows of the CSV file, and the table of our page.

A row is ``what`` was counted or measured, of which ``part`` (a phase, or a process), its ``value``
and ``unit``, with ``low`` and ``high`` where it has a 95% interval:

    p99 / p99 of calm    ratio of the 99th percentiles of two phases; resampled requests
    MEASURE: slope       of the last phase, per hour: least squares through the medians of twenty
                         stretches of equal length, with Student's t; stretches are long beside
                         what a garbage collection or a burst takes
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.context import Rows
from bench.soak_load import Answer, Request
from bench.tables import markdown, section

CALM, RUDELY, EVERYTHING = PHASES = ("calm", "rude", "everything")
MEASURES = ("memory", "file descriptors", "threads", "sockets")
UNITS = ("MiB", "", "", "")
SHADOWED = 10  # every so many good requests one is sent again
STRETCHES = 20
STUDENT = 2.101  # 97.5% of Student's t with STRETCHES - 2 degrees of freedom
RESAMPLED = 1000
WRONG = ("failed", "other tokens", "tracebacks")  # rows whose value has to be 0

Row = dict[str, object]


class Sample(NamedTuple):
    """What a process held at a time of ``time.monotonic``: the ``MEASURES``."""

    seconds: float
    process: str
    held: tuple[float, ...]


@dataclass
class Record:
    """What happened; lists are in the order of time."""

    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)  # by phase and kind
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    shadows: list[tuple[Request, Answer]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    begins: dict[str, float] = field(default_factory=dict)  # of each phase, of ``time.monotonic``
    ended: float = 0.0
    num_good: int = 0
    num_different: int = 0
    num_tracebacks: int = 0

    def answered(self, phase: str, request: Request, answer: Answer, seconds: float) -> None:
        """Count a good request; every tenth of those that were answered has a shadow."""
        self.sent[phase, request.kind] += 1
        if not answer.is_good:
            self.failed[phase, request.kind] += 1
            self.problems.append(f"{request.kind}: HTTP {answer.status} {answer.problem}")
            return
        self.latencies[phase].append(seconds)
        self.num_good += 1
        if self.num_good % SHADOWED == 0:
            self.shadows.append((request, answer))

    def got(self, phase: str, kind: str, statuses: Sequence[int]) -> None:
        """Count hostile requests; statuses of 500 and above are failures of the server."""
        self.sent[phase, kind] += max(1, len(statuses))
        bad = [status for status in statuses if status >= 500]
        self.failed[phase, kind] += len(bad)
        self.problems += [f"{kind}: HTTP {status}" for status in bad]

    def read_log(self, text: str) -> None:
        """Count tracebacks; the last line of each is a problem."""
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if "Traceback (most recent call last)" in line:
                self.num_tracebacks += 1
                last = (one for one in lines[number:] if re.search(r"\w+(Error|Exception)\b", one))
                self.problems.append(f"log: {next(last, line)}"[:300])


# --- rows -----------------------------------------------------------------------------------------


def report(record: Record, seed: int) -> list[Row]:
    """All rows."""
    rows = [_row("requests", f"{phase}: {kind}", n) for (phase, kind), n in record.sent.items()]
    rows += [
        _row("failed", f"{phase}: {kind}", n) for (phase, kind), n in record.failed.items() if n
    ]
    rows += latencies(record.latencies, seed)
    for process in dict.fromkeys(one.process for one in record.samples):
        rows += resources(record, process)
    rows += [
        _row("sent once more", "", len(record.shadows)),
        _row("other tokens", "", record.num_different),
        _row("tracebacks", "log", record.num_tracebacks),
    ]
    return rows


def is_clean(rows: Sequence[Row]) -> bool:
    """Whether nothing failed that must not."""
    return not any(row["value"] for row in rows if row["what"] in WRONG)


def _row(
    what: str,
    part: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    *,
    unit: str = "",
) -> Row:
    return {"what": what, "part": part, "value": value, "unit": unit, "low": low, "high": high}


def latencies(found: dict[str, list[float]], seed: int) -> list[Row]:
    """Median and 99th percentile of good requests by phase, and ratios to the calm phase."""
    rows = [
        _row(f"p{percent}", phase, 1e3 * float(np.percentile(seconds, percent)), unit="ms")
        for phase, seconds in found.items()
        for percent in (50, 99)
    ]
    compared = [phase for phase in PHASES[1:] if found.get(CALM) and found.get(phase)]
    return rows + [
        _row("p99 / p99 of calm", phase, *ratio(found[phase], found[CALM], seed))
        for phase in compared
    ]


def ratio(these: Sequence[float], those: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Ratio of the 99th percentiles, with the 95% interval of resampled requests."""
    draw = np.random.default_rng(seed)

    def resampled(values: Sequence[float]) -> np.ndarray:
        drawn = draw.choice(np.asarray(values), (RESAMPLED, len(values)))
        return np.percentile(drawn, 99, axis=1)

    low, high = np.percentile(resampled(these) / resampled(those), [2.5, 97.5])
    value = np.percentile(these, 99) / np.percentile(those, 99)
    return float(value), float(low), float(high)


def resources(record: Record, process: str) -> list[Row]:
    """Median and slope of each measure of a process, in the last phase."""
    begin = record.begins[EVERYTHING]
    samples = [one for one in record.samples if one.process == process and one.seconds >= begin]
    times, rows = [one.seconds for one in samples], []
    for index, (measure, unit) in enumerate(zip(MEASURES, UNITS, strict=True)):
        values = [one.held[index] for one in samples]
        rows.append(_row(measure, process, statistics.median(values), unit=unit))
        if found := slope(times, values):
            an_hour = f"{unit} an hour".strip()
            rows.append(_row(f"{measure}: slope", process, *found, unit=an_hour))
    return rows


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float] | None:
    """Per hour, with its 95% interval; None with fewer than two samples a stretch.

    Args:
        times: seconds, ascending.
    """
    if len(times) < 2 * STRETCHES:
        return None
    hours = [statistics.mean(part) / 3600 for part in np.array_split(times, STRETCHES)]
    medians = [statistics.median(part) for part in np.array_split(values, STRETCHES)]
    line = statistics.linear_regression(hours, medians)
    gaps = (y - line.intercept - line.slope * x for x, y in zip(hours, medians, strict=True))
    error = math.dist(list(gaps), [0] * STRETCHES) / math.dist(
        hours, [statistics.mean(hours)] * STRETCHES
    )
    error *= STUDENT / math.sqrt(STRETCHES - 2)
    return line.slope, line.slope - error, line.slope + error


# --- table ----------------------------------------------------------------------------------------


def soak(results: Path) -> str:
    """Section of docs/reliability.md: what the campaign sent, and what it found."""
    return section(results / "soak.csv", "python -m bench.soak", _tables)


def _tables(rows: Rows) -> str:
    """Requests and latencies by phase; what each process holds, and its slope; the replays."""
    found = {(row["what"], row["part"]): row for row in rows}
    kinds = dict.fromkeys(part.split(": ")[1] for what, part in found if what == "requests")
    lines = []
    for kind in kinds:
        sent = [_number(found.get(("requests", f"{phase}: {kind}")), 0) for phase in PHASES]
        wrong = [found.get(("failed", f"{phase}: {kind}")) for phase in PHASES]
        failed = [f" ({row['value']} failed)" if row else "" for row in wrong]
        lines.append([kind, *(one + said for one, said in zip(sent, failed, strict=True))])
    for what, decimals in (("p50", 0), ("p99", 0), ("p99 / p99 of calm", 2)):
        cells = [_number(found.get((what, phase)), decimals) for phase in PHASES]
        lines.append([f"good requests: {what}", *cells])
    held = []
    for process in (part for what, part in found if what == MEASURES[0]):
        cells = [process]
        for measure in MEASURES:
            value = _number(found.get((measure, process)), 1 if measure == "memory" else 0)
            cells.append(f"{value}; {_number(found.get((f'{measure}: slope', process)), 1)}")
        held.append(cells)
    replays, different = found["sent once more", ""]["value"], found["other tokens", ""]["value"]
    verdict = (
        f"Sent once more, alone: {replays} good requests; {different} of them got other tokens. "
        f"Tracebacks in the log: {found['tracebacks', 'log']['value']}."
    )
    tables = markdown((["", *PHASES], lines)), markdown((["everything", *MEASURES], held))
    return "\n\n".join([*tables, verdict])


def _number(row: dict[str, str] | None, decimals: int) -> str:
    """``value unit [low .. high]``, or a dash."""
    if row is None:
        return "-"
    value, low, high = (
        f"{float(row[name]):.{decimals}f}" if row[name] else "" for name in ("value", "low", "high")
    )
    unit = f" {row['unit']}" if row["unit"] else ""
    return f"{value}{unit} [{low} .. {high}]" if low else f"{value}{unit}"
