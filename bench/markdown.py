"""Pieces of the Markdown that ``bench.readme`` writes."""

from collections.abc import Sequence
from pathlib import Path

Rows = list[dict[str, str]]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def measured_with(rows: Rows, file: str) -> str:
    """Where the numbers come from."""
    first = rows[0]
    runs = dict.fromkeys(f"`{row['command']}`, commit {row['commit']}" for row in rows)
    return (
        f"{'; '.join(runs)}, {first['machine']}, {first['versions']} ([CSV](bench/results/{file}))."
    )


def figure(results: Path, name: str, what: str) -> list[str]:
    """An image, if ``bench.plot`` drew it."""
    return [f"![{what}](bench/results/{name}.svg)"] if (results / f"{name}.svg").exists() else []
