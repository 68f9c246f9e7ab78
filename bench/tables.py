"""Medians with their range, ratios of the same round, and tables of servers side by side.

Rows are those of a CSV file; an empty cell has no value and is left out. The first contestant of
the rows is the one that the others are compared with.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.context import Rows, read_csv


def spread(rows: Rows, column: str, decimals: int = 1) -> str:
    """The median with smallest and largest value, or a dash without values."""
    return spread_of([float(row[column]) for row in rows if row[column]], decimals)


def spread_of(values: Sequence[float], decimals: int) -> str:
    """``median [low .. high]``; the value alone if there is one, a dash if there is none."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{decimals}f}"
    ends = statistics.median(values), min(values), max(values)
    return "{} [{} .. {}]".format(*(f"{value:.{decimals}f}" for value in ends))


def middle(rows: Rows, column: str, decimals: int = 1) -> str:
    return spread(rows, column, decimals).split(" ")[0]


def ratios(rows: Rows, others: Rows, column: str) -> str:
    """``rows / others`` of each round in which both have a value, median and range; or a dash."""
    ours = {row["pair"]: float(row[column]) for row in rows if row[column]}
    theirs = {row["pair"]: float(row[column]) for row in others if row[column]}
    return spread_of([ours[pair] / theirs[pair] for pair in ours if theirs.get(pair)], 2)


def markdown(header: list[str], lines: list[list[str]]) -> str:
    text = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([text[0], "|---" * len(header) + "|", *text[1:]])


def grouped(rows: Rows, *columns: str) -> dict[tuple[str, ...], Rows]:
    """The rows by the values of these columns, in the order in which they appear."""
    found: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def of(rows: Rows, contestant: str) -> Rows:
    return [row for row in rows if row["contestant"] == contestant]


def names_of(rows: Rows) -> list[str]:
    return [name for (name,) in grouped(rows, "contestant")]


@dataclass(frozen=True)
class Section:
    """What a page shows of a CSV file, and commands, commits, machine and versions behind it.

    Called with the folder of the file; if it is not there, says which command writes it.
    """

    file: str
    command: str
    show: Callable[[Rows], str]

    def __call__(self, results: Path) -> str:
        rows = read_csv(results / self.file)
        if not rows:
            return f"Not measured yet: `{self.command}`."
        runs = "; ".join(
            f"`{line}`, commit {commit}" for line, commit in grouped(rows, "command", "commit")
        )
        about = f"{runs}, {rows[0]['machine']}, {rows[0]['versions']}"
        return f"{self.show(rows)}\n\n{about} ([CSV](bench/results/{self.file}))."


TITLES = {
    "adaptive": "adaptive denoise steps, questions",
    "fixed": "fixed steps, random tokens",
}
COLUMNS = (
    ("tokens_per_s", "tokens/s", 0, spread),
    ("tokens_per_pass", "tokens per pass", 2, middle),
    ("ttft_ms", "TTFT, ms", 0, middle),
    ("latency_ms", "latency p50, ms", 0, spread),
    ("latency_p99_ms", "p99, ms", 0, middle),
    ("ms_per_denoise_step", "ms per denoise step", 1, middle),
    ("steps_per_block", "steps per block", 2, middle),
    ("passes_per_block", "passes per block", 2, middle),
)


def load_tables(rows: Rows) -> str:
    parts = []
    for (schedule,), here in grouped(rows, "schedule").items():
        count = len(grouped(here, "pair"))
        parts += [f"**{TITLES[schedule]} (rounds: {count})**", load_table(here)]
    return "\n\n".join([*parts, *problems(rows)])


def load_table(rows: Rows) -> str:
    """One line a load and contestant, of one schedule; the last columns are ratios pair by pair."""
    first, *_ = names_of(rows)
    columns = [one for one in COLUMNS if any(row[one[0]] for row in rows)]
    header = ["load", "", *(heading for _, heading, *_ in columns), "correct"]
    header += [f"{first} / this: latency p50", f"{first} / this: tokens/s"]
    lines = []
    for (at_once, rate), here in grouped(rows, "concurrency", "rate").items():
        title = f"{at_once} at once" if at_once else f"{float(rate):g} per s"
        for (name,), own in grouped(here, "contestant").items():
            compared = ["", ""]
            if name != first:
                both = of(here, first), own
                compared = [ratios(*both, column) for column in ("latency_ms", "tokens_per_s")]
            numbers = [show(own, column, n) for column, _, n, show in columns]
            lines.append([title, name, *numbers, _correct(own), *compared])
    return markdown(header, lines)


def _correct(rows: Rows) -> str:
    """``right / asked``, where questions were asked."""
    asked = [row for row in rows if row["num_correct"]]
    right = sum(int(row["num_correct"]) for row in asked)
    return f"{right} / {sum(int(row['num_requests']) for row in asked)}" if asked else "-"


def problems(rows: Rows) -> list[str]:
    wrong = (f"* {row['contestant']}: {row['problem']}" for row in rows if row.get("problem"))
    lines = list(dict.fromkeys(wrong))
    return ["\n".join(["No speed is reported where answers were wrong:", *lines])] if lines else []


def contestant_table(rows: Rows) -> str:
    """One line a contestant, with its tokens/s at each load.

    Tokens a step: of a pass with canvases, or of a step that verified drafts.
    """
    loads = list(grouped(rows, "concurrency"))
    lines = []
    for name in names_of(rows):
        own = of(rows, name)
        found = [[row for row in own if (row["concurrency"],) == load] for load in loads]
        right, asked = (
            sum(int(row[column]) for here in found for row in here)
            for column in ("num_correct", "num_requests")
        )
        speeds = [spread(here, "tokens_per_s", 0) for here in found]
        drafted = middle(own, "acceptance_length")
        steps = drafted if drafted != "-" else middle(own, "tokens_per_pass")
        lines.append([f"`{name}`", *speeds, steps, f"{right} / {asked}"])
    heads = ["", *(f"{load} at once" for (load,) in loads), "tokens a step", "right answers"]
    return markdown(heads, lines)
