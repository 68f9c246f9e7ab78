"""Medians with their range, ratios of the same round, and tables for a terminal or a page.

Rows are those of a CSV file; an empty cell has no value and is left out.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.context import Rows

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
    """For a page."""
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
