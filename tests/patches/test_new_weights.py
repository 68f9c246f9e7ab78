"""Which checkpoints are refused as new weights, before anything is loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dllm.patches.new_weights import refuse_other_checkpoint


def sharded(folder: Path, rows: int = 3) -> Path:
    """A checkpoint of two files and their index."""
    folder.mkdir()
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in files.items():
        save_file({name: torch.zeros(rows, 2)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def test_files_beside_the_index_are_not_looked_at(tmp_path):
    """vLLM does not load them: weights in another format, an adapter."""
    served, new = sharded(tmp_path / "served"), sharded(tmp_path / "new")
    save_file({"a": torch.zeros(7), "c": torch.zeros(7)}, new / "consolidated.safetensors")
    refuse_other_checkpoint(str(new), str(served))


def test_another_shape_is_refused(tmp_path):
    served, new = sharded(tmp_path / "served"), sharded(tmp_path / "new", rows=4)
    with pytest.raises(ValueError, match=r"a is \[4, 2\], served is \[3, 2\]"):
        refuse_other_checkpoint(str(new), str(served))
