"""A checkpoint directory: its config.json, and its tensors, read one at a time.

Files are mapped into memory, and only tensors that are read take any. So a checkpoint of 26B
parameters can be read on a machine with far less memory.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dllm.models import FAMILIES
from dllm.settings.checks import missing_folder
from dllm.settings.command import CommandError

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "Make or download it again."
FEW = 5  # names that a message lists


class Checkpoint:
    """The tensors of a directory in Hugging Face's layout, by name.

    Raises CommandError: the directory does not exist or holds another kind of model, or a file is
    missing, cut short or not in safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self._read_config()
        self.files: dict[str, Path] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        index = self._read_index()
        for file in self._weight_files(index):
            for name, tensor in mapped(file).items():
                if name in self.files:
                    raise CommandError(f"{name} is in {self.files[name]} and again in {file}.")
                self.files[name], self.tensors[name] = file, tensor
        absent = sorted(index.keys() - self.files.keys())
        if absent:
            raise CommandError(
                f"{path / INDEX} promises {few(absent)}, which no file holds. {AGAIN}"
            )

    def _read_config(self) -> dict[str, object]:
        file = self.path / "config.json"
        if reason := missing_folder(str(self.path)):
            raise CommandError(f"{self.path}: {reason}")
        if not file.is_file():
            raise CommandError(
                f"{self.path} has no config.json; give the directory of a checkpoint "
                "(`hf download NAME --local-dir DIR` makes one of a model on the hub)."
            )
        config = _read_json(file)
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not {*architectures} & {*FAMILIES}:
            raise CommandError(
                f"{file}: architectures = {architectures!r}; supported: {', '.join(FAMILIES)}."
            )
        return config

    def _read_index(self) -> dict[str, str]:
        if not (self.path / INDEX).is_file():
            return {}
        weight_map = _read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CommandError(f"{self.path / INDEX} has no weight_map; write the index again.")
        return weight_map

    def _weight_files(self, index: Mapping[str, str]) -> list[Path]:
        names = sorted(set(index.values())) or [WEIGHTS]
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing and index:
            raise CommandError(
                f"{self.path / INDEX} names {few(missing)}, which is not there. {AGAIN}"
            )
        if missing:
            raise CommandError(
                f"{self.path} has neither {WEIGHTS} nor {INDEX}: it was not written to its end, or "
                f"its weights are not in safetensors. {AGAIN}"
            )
        return [self.path / name for name in names]


def mapped(file: Path) -> dict[str, torch.Tensor]:
    """Raises CommandError if it cannot be read: incomplete, damaged or another kind of file."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CommandError(
            f"{file} cannot be read ({error}): it was cut short or damaged. {AGAIN}"
        ) from error


def in_units(num_bytes: float) -> str:
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{num_bytes / unit:.2f} {name}"


def few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def _read_json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is no JSON ({error}). {AGAIN}") from error
    if not isinstance(value, Mapping):
        raise CommandError(f"{file} holds no JSON object. {AGAIN}")
    return dict(value)
