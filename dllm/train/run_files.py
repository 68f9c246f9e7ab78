"""The files of a run's directory: what it was started with, its log and its checkpoint."""

import csv
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from dllm.settings.command import CommandError

START = "run.json"  # settings and inputs
LOG = "log.csv"  # a row for each evaluation
STATE = "state.pt"  # the checkpoint to resume from
CURVE = "curve.svg"  # the log as a picture
MODEL = "model"  # folder of the finished checkpoint
CARD = "README.md"  # model card, in that folder


def started_with(out: Path) -> dict[str, object]:
    """What the run in a directory was started with; empty if there is no run."""
    path = out / START
    return json.loads(path.read_text()) if path.exists() else {}


def check_run(out: Path, given: Mapping[str, object], resume: bool) -> None:
    """Make sure that a run may begin in a directory, or go on there.

    Args:
        given: what decides the weights, as JSON values by name.

    Raises:
        CommandError: the directory holds a run and ``resume`` was not asked for, or the reverse,
            or its run was started with something else.
    """
    if not resume:
        if (out / START).exists() or (out / STATE).exists():
            raise CommandError(f"{out} holds a run; go on with --resume, or give another --out.")
        return
    if not (out / START).exists() and (out / STATE).exists():
        raise CommandError(
            f"{out} holds a {STATE} without the {START} that says what it was started with, so it "
            "cannot be resumed; give another --out."
        )
    if not (out / START).exists():
        raise CommandError(
            f"{out} holds no {START} to resume; leave out --resume, or give another --out."
        )
    before = started_with(out)
    for name, value in json.loads(json.dumps(given)).items():
        if before.get(name) != value:
            raise CommandError(
                f"{out / START}: the run was started with {name} = {before.get(name)!r}, given is "
                f"{value!r}; give another --out, or the settings that it was started with."
            )


def write_start(out: Path, given: Mapping[str, object]) -> None:
    """Make the directory of a run, and note what the run is started with."""
    out.mkdir(parents=True, exist_ok=True)
    (out / START).write_text(json.dumps(given, indent=1) + "\n")


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Add a row to a log; a new log gets the header first."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a log."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def forget_later_rows(path: Path, last_step: float) -> None:
    """Remove the rows of a log behind a step, which a resumed run writes again."""
    if path.exists():
        rows = read_log(path)
        path.unlink()
        for row in rows:
            if int(row["step"]) <= last_step:
                append_row(path, row)


def save_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a checkpoint; an interrupted write leaves the one before."""
    temporary = path.with_name(f"{path.name}.part")
    torch.save(dict(state), temporary)
    temporary.replace(path)


def copy_log(out: Path, model: Path) -> None:
    """Put the log and its picture beside the weights, to document them."""
    for name in (LOG, CURVE):
        if (out / name).exists():
            shutil.copyfile(out / name, model / name)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as indented JSON; characters beyond ASCII stay readable."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
