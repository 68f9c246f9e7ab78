"""The CSV log of a run and its checkpoint file: what makes a resumed run one run."""

import csv
from collections.abc import Mapping
from pathlib import Path

import torch


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Add a row to a log; a new one gets the header first."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def forget_later_rows(path: Path, last_step: float) -> None:
    """Cut a log, if there is one, to the rows up to a step: what came after is done again."""
    if path.exists():
        header, *rows = path.read_text().splitlines(keepends=True)
        kept = [row for row in rows if int(row.split(",", 1)[0]) <= last_step]
        path.write_text("".join([header, *kept]))


def save_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a checkpoint; an interrupted write leaves the one before."""
    temporary = path.with_name(f"{path.name}.part")
    torch.save(dict(state), temporary)
    temporary.replace(path)
