"""Copies of checkpoints that were changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
Edit = Callable[[dict[str, torch.Tensor]], object]


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """Copy a checkpoint to ``target``; ``edit`` changes its tensors, by name, in place."""
    shutil.copytree(source, target)
    tensors = load_file(target / WEIGHTS)
    edit(tensors)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target
