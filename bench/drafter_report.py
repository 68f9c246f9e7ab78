"""The tables of drafter.csv: speed beside plain decoding, and what was drafted for it."""

from pathlib import Path

from bench.context import read_csv
from bench.markdown import Rows, markdown, measured_with
from bench.readme_serving import middle, ratios, total

PLAIN, MIXED = "plain", "mixed"
FILE = "drafter.csv"
COUNTS = ("drafted", "verified", "accepted", "drafting_s")


def drafting(results: Path) -> str:
    """README section: the tables and where they come from."""
    rows = read_csv(results / FILE)
    if not rows:
        return "Not measured yet: `python -m bench.drafter`."
    return f"{tables(rows)}\n\n{measured_with(rows, FILE)}"


def tables(rows: Rows) -> str:
    """Every load's speeds, the counts of each server, and what was wrong with runs of no speed."""
    problems = dict.fromkeys(
        f"No speed of {row['contestant']}, {row['family']}: {row['problem']}"
        for row in rows
        if row["problem"]
    )
    return "\n\n".join([_speeds(rows), _counts(rows), *problems])


def _speeds(rows: Rows) -> str:
    """Of every load: tokens/s of plain decoding, and of the others their ratio to it."""
    others = [name for name in _names(rows) if name != PLAIN]
    lines = []
    for load in dict.fromkeys((row["family"], row["concurrency"]) for row in rows):
        here = [row for row in rows if (row["family"], row["concurrency"]) == load]
        plain = [row for row in here if row["contestant"] == PLAIN]
        cells = [*load, middle(plain, "tokens_per_s", 0)]
        for name in others:
            own = [row for row in here if row["contestant"] == name]
            length = middle(own, "acceptance_length")
            cells.append(ratios(own, plain, "tokens_per_s") + (f" · {length}" * (length != "-")))
        lines.append(cells)
    header = ["questions", "at once", "plain, tokens/s", *(f"{name} / plain" for name in others)]
    note = (
        "Ratios of tokens/s in the same round: median [min .. max]; behind the dot, tokens per "
        "step that verified drafts."
    )
    return f"{markdown(header, lines)}\n\n{note}"


def _counts(rows: Rows) -> str:
    """Of every server that drafts, all loads together."""
    lines = []
    for name in _names(rows):
        own = [row for row in rows if row["contestant"] == name]
        if name != PLAIN:
            counts = [f"{total(own, column):,.0f}" for column in COUNTS]
            lines.append([name, f"{total(own, 'output_tokens'):,.0f}", *counts])
    header = ["all loads", "output tokens", "drafted", "verified", "accepted", "seconds drafting"]
    return markdown(header, lines)


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for row in sorted(rows, key=_in_first_order)))


def _in_first_order(row: dict[str, str]) -> tuple[int, int]:
    """The first round begins with plain decoding, the others with somebody else."""
    return int(row["pair"]), int(row["position"])
