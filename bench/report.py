"""Tables of measurements: medians with the spread, ratios pair by pair, what was wrong."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.measure import SPEEDS, Measurement
from bench.workloads import Workload

# Rows of a table: attribute, heading, decimals.
METRICS = (
    ("tokens_per_s", "output tokens/s", 1),
    ("requests_per_s", "requests/s", 2),
    ("ttft_ms", "time to first token p50, ms", 1),
    ("latency_ms", "end-to-end latency p50, ms", 1),
    ("latency_p99_ms", "end-to-end latency p99, ms", 1),
    ("ms_per_denoise_step", "ms per denoise step", 2),
    ("steps_per_block", "denoise steps per block", 2),
    ("passes_per_block", "passes per block", 2),
    ("tokens_per_pass", "tokens per forward pass", 2),
    ("peak_memory_mib", "peak memory, MiB", 0),
    ("num_correct", "answers correct", 0),
    ("idle_cpu_percent", "CPU of the idle others, %", 1),
)
# Those that a ratio to another contestant says something about.
COMPARED = (*SPEEDS, "passes_per_block", "tokens_per_pass", "peak_memory_mib")

Measured = Sequence[tuple[Workload, Measurement]]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a few values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, decimals: int) -> str:
        """``median [low .. high]``."""
        middle, low, high = (f"{value:.{decimals}f}" for value in asdict(self).values())
        return f"{middle} [{low} .. {high}]"


def values_of(measurements: Sequence[Measurement], contestant: str, metric: str) -> list[float]:
    """A metric of the runs of a contestant that have it."""
    found = (getattr(one, metric) for one in measurements if one.contestant == contestant)
    return [value for value in found if value is not None]


def pair_ratios(
    measurements: Sequence[Measurement], metric: str, contestant: str, other: str
) -> list[float]:
    """``contestant / other`` of each pair in which both have the metric, in order."""
    pairs: dict[int, dict[str, float]] = {}
    for one in measurements:
        value = getattr(one, metric)
        if value:
            pairs.setdefault(one.pair, {})[one.contestant] = value
    both = (pairs[pair] for pair in sorted(pairs) if {contestant, other} <= set(pairs[pair]))
    return [pair[contestant] / pair[other] for pair in both]


def tables(measured: Measured) -> str:
    """One table a workload; the first contestant is compared with each of the others."""
    workloads = list(dict.fromkeys(workload for workload, _ in measured))
    blocks = []
    for workload in workloads:
        runs = [one for its, one in measured if its == workload]
        blocks.append(table(workload, runs))
    return "\n\n".join(blocks)


def table(workload: Workload, runs: Sequence[Measurement]) -> str:
    """Medians with the smallest and largest value, and the ratios pair by pair."""
    names = list(dict.fromkeys(one.contestant for one in runs))  # as in the first round
    first, others = names[0], names[1:]
    rows = [["", *names, *(f"{first} / {other}" for other in others)]]
    for metric, heading, decimals in METRICS:
        cells = [heading]
        for name in names:
            values = values_of(runs, name, metric)
            cells.append(Spread.of(values).text(decimals) if values else "-")
        for other in others:
            ratios = pair_ratios(runs, metric, first, other) if metric in COMPARED else []
            cells.append(Spread.of(ratios).text(3) if ratios else "")
        if any(cell not in ("-", "") for cell in cells[1:]):
            rows.append(cells)
    num_rounds = len({one.pair for one in runs})
    title = f"{workload.name}: {num_rounds} rounds of {workload.num_requests} requests"
    problems = dict.fromkeys(
        f"no speed of {one.contestant}, round {one.pair + 1}: {one.problem}"
        for one in runs
        if one.problem
    )
    return "\n".join([f"{title}; median [min .. max]", *aligned(rows), *problems])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def csv_rows(measured: Measured, mode: str, provenance: dict[str, str]) -> list[dict[str, object]]:
    """One row a run: mode, workload, numbers, provenance."""
    return [
        {
            "mode": mode,
            "schedule": workload.schedule,
            "prompts": workload.prompts,
            "concurrency": workload.concurrency,
            "rate": workload.rate,
            **asdict(one),
            **provenance,
        }
        for workload, one in measured
    ]
