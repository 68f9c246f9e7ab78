"""Medians with their range, ratios of the same round, and tables of servers side by side.

Rows are those of a CSV file; an empty cell has no value and is left out. The first contestant of
the rows is the one that the others are compared with.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.context import Rows, read_csv

# A heading and lines of cells.
Table = tuple[list[str], list[list[str]]]


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
        middle, low, high = (f"{x:.{decimals}f}" for x in (self.median, self.low, self.high))
        return f"{middle} [{low} .. {high}]"


def values(rows: Rows, column: str) -> list[float]:
    """A column of the rows that have a value."""
    return [float(row[column]) for row in rows if row[column]]


def middle(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median, or a dash without values."""
    found = values(rows, column)
    return f"{statistics.median(found):.{decimals}f}" if found else "-"


def spread(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median with smallest and largest value, or a dash without values."""
    found = values(rows, column)
    return Spread.of(found).text(decimals) if found else "-"


def ratios(rows: Rows, others: Rows, column: str) -> str:
    """``rows / others`` of each round in which both have a value, median and range; or a dash."""
    ours = {row["pair"]: float(row[column]) for row in rows if row[column]}
    theirs = {row["pair"]: float(row[column]) for row in others if row[column]}
    both = [ours[pair] / theirs[pair] for pair in ours if theirs.get(pair)]
    return Spread.of(both).text(2) if both else "-"


def markdown(table: Table) -> str:
    """As Markdown."""
    header, lines = table
    text = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([text[0], "|---" * len(header) + "|", *text[1:]])


def measured_with(rows: Rows, file: str) -> str:
    """Commands, commits, machine and versions behind the rows, with a link to the CSV file."""
    first = rows[0]
    runs = dict.fromkeys(f"`{row['command']}`, commit {row['commit']}" for row in rows)
    return (
        f"{'; '.join(runs)}, {first['machine']}, {first['versions']} ([CSV](bench/results/{file}))."
    )


def section(path: Path, command: str, show: Callable[[Rows], str]) -> str:
    """What a page shows of a CSV file, and where that is from; or which command writes the file."""
    rows = read_csv(path)
    if not rows:
        return f"Not measured yet: `{command}`."
    return f"{show(rows)}\n\n{measured_with(rows, path.name)}"


# --- servers side by side ------------------------------------------------------------------------

TITLES = {"adaptive": "adaptive denoise steps, questions", "fixed": "fixed steps, random tokens"}
COLUMNS = (
    ("tokens_per_s", "tokens/s", 0, spread),
    ("ttft_ms", "TTFT, ms", 0, middle),
    ("latency_ms", "latency p50, ms", 0, spread),
    ("latency_p99_ms", "p99, ms", 0, middle),
    ("ms_per_denoise_step", "ms per denoise step", 1, middle),
    ("steps_per_block", "steps per block", 2, middle),
    ("passes_per_block", "passes per block", 2, middle),
    ("tokens_per_pass", "tokens per pass", 1, middle),
)


def of(rows: Rows, contestant: str) -> Rows:
    """The rows of a contestant."""
    return [row for row in rows if row["contestant"] == contestant]


def names_of(rows: Rows) -> list[str]:
    """The contestants, in the order of the first round."""
    return list(dict.fromkeys(row["contestant"] for row in rows))


def load_table(rows: Rows) -> Table:
    """One line a load and contestant, of one schedule; the last columns are ratios pair by pair."""
    first, *_ = names = names_of(rows)
    header = ["load", "", *(heading for _, heading, *_ in COLUMNS), "correct"]
    header += [f"{first} / this: latency p50", f"{first} / this: tokens/s"]
    lines = []
    for load in dict.fromkeys((row["concurrency"], row["rate"]) for row in rows):
        here = [row for row in rows if (row["concurrency"], row["rate"]) == load]
        title = f"{load[0]} at once" if load[0] else f"{float(load[1]):g} per s"
        for name in names:
            if not (own := of(here, name)):
                continue
            compared = ["", ""]
            if name != first:
                both = of(here, first), own
                compared = [ratios(*both, column) for column in ("latency_ms", "tokens_per_s")]
            numbers = [show(own, column, n) for column, _, n, show in COLUMNS]
            lines.append([title, name, *numbers, _correct(own), *compared])
    return header, lines


def _correct(rows: Rows) -> str:
    """``right / asked``, where questions were asked."""
    asked = [row for row in rows if row["num_correct"]]
    right = sum(int(row["num_correct"]) for row in asked)
    return f"{right} / {sum(int(row['num_requests']) for row in asked)}" if asked else "-"


def problems(rows: Rows) -> list[str]:
    """What was wrong with runs that have no speed, a line each."""
    wrong = (f"* {row['contestant']}: {row['problem']}" for row in rows if row["problem"])
    lines = list(dict.fromkeys(wrong))
    return ["\n".join(["No speed is reported where answers were wrong:", *lines])] if lines else []


def load_tables(rows: Rows) -> str:
    """A table for each schedule, then what was wrong."""
    parts = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        here = [row for row in rows if row["schedule"] == schedule]
        rounds = len({row["pair"] for row in here})
        parts += [f"**{TITLES[schedule]} (rounds: {rounds})**", markdown(load_table(here))]
    return "\n\n".join([*parts, *problems(rows)])


# --- sections of our pages -----------------------------------------------------------------------


def serving(results: Path) -> str:
    """All contestants at all loads, compiled."""
    return section(results / "serve_compiled.csv", "make bench", load_tables)


def families(results: Path) -> str:
    """Section of docs/families.md: models with blocks, a line a block size and load."""
    path, command = results / "families.csv", "python -m bench.serve --model checkpoints/tiny-sdar"
    return section(path, command, lambda rows: markdown(_by_block(rows)))


def _by_block(rows: Rows) -> Table:
    first, *others = names_of(rows)
    lines = []
    for size, load in dict.fromkeys((row["canvas_length"], row["concurrency"]) for row in rows):
        here = [r for r in rows if (r["canvas_length"], r["concurrency"]) == (size, load)]
        own = of(here, first)
        compared = [ratios(own, of(here, name), "tokens_per_s") for name in others]
        lines.append([f"B = {size}, {load} at once", spread(own, "tokens_per_s", 0), *compared])
    return ["", f"{first}, tokens/s", *(f"{first} / {name}" for name in others)], lines
