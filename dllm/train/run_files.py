"""The files of a run's directory, and what it was started with."""

import csv
import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm.settings.command import CommandError

START = "run.json"  # settings and inputs
LOG = "log.csv"  # a row for each evaluation
STATE = "state.pt"  # the checkpoint to resume from
MODEL = "model"  # folder of the checkpoint to use
CARD = "README.md"  # model card, in that folder
WEIGHTS = "model.safetensors"  # in that folder


def begin(out: Path, given: Mapping[str, object], resume: bool) -> None:
    """Make the directory of a run and note what the run is started with, or go on with one.

    Args:
        given: what has to be the same in a resumed run, as JSON values by name.

    Raises:
        CommandError: the directory holds a run and ``resume`` was not asked for, or the reverse,
            or its run was started with something else. Nothing has been written then.
    """
    start, state = out / START, out / STATE
    if not resume:
        if start.exists() or state.exists():
            raise CommandError(f"{out} holds a run; go on with --resume, or give another --out.")
        out.mkdir(parents=True, exist_ok=True)
        write_json(start, given)
        return
    if not start.exists():
        raise CommandError(
            f"{out} holds no {START}, which says what its run was started with, so there is "
            "nothing to resume; leave out --resume, or give another --out."
        )
    before = json.loads(start.read_text())
    for name, value in json.loads(json.dumps(given)).items():
        if before.get(name) != value:
            raise CommandError(
                f"{start}: the run was started with {name} = {before.get(name)!r}, given is "
                f"{value!r}; give another --out, or what it was started with."
            )


def write_log(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a CSV file anew; its columns are the keys of the first row. At least one is needed."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as indented JSON; characters beyond ASCII stay readable."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def weights_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's model.safetensors, in hexadecimal digits."""
    with (checkpoint / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_weights(path: Path, tensors: Mapping[str, Tensor], kept: Container[str] = ()) -> None:
    """Write tensors in bf16, those that are named in ``kept`` as they are.

    An interrupted write leaves the file before.
    """
    half = {
        name: (tensor if name in kept else tensor.to(torch.bfloat16)).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    unfinished = path.with_name(f"{path.name}.part")
    save_file(half, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors writes it readable by its owner only
    unfinished.replace(path)
