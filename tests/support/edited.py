"""Copies of checkpoints that were changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
Edit = Callable[[dict[str, torch.Tensor]], object]


def edited(source: Path, target: Path, edit: Edit, file: str = WEIGHTS) -> Path:
    """Copy a checkpoint to ``target``; ``edit`` changes its tensors, by name, in place."""
    shutil.copytree(source, target)
    tensors = load_file(target / file)
    edit(tensors)
    save_file(tensors, target / file, metadata={"format": "pt"})
    return target


def with_fields(source: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """Copy a checkpoint to ``target`` and change one of its JSON files; None removes a field."""
    shutil.copytree(source, target)
    fields = json.loads((target / file).read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (target / file).write_text(json.dumps(kept))
    return target
