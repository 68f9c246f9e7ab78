"""A checkpoint that cannot be right stops a server at start, with what is wrong and where."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.models.quantized import finite
from tests.support.engine_harness import LLM

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), tmp_path / "damaged"))


def refusal(model: Path) -> str:
    """What the start of an engine says."""
    with pytest.raises(Exception) as error:  # safetensors' own is one of them
        LLM(str(model), enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 24)
    print(error.value)
    return f"{type(error.value).__name__}: {error.value}"


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def test_a_truncated_file(copied):
    whole = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    said = refusal(copied)
    assert "SafetensorError" in said and "incomplete" in said.lower()


@pytest.mark.parametrize("layer", ["self_attn.q_norm", "self_attn.q_proj"])  # kept, and packed
def test_a_weight_that_is_not_finite(copied, layer):
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = [name for name in tensors if name.endswith(f"layers.1.{layer}.weight")]
        tensors[name].view(-1)[3] = float("nan")

    change_weights(copied, poison)
    said = refusal(copied)
    assert "NaN or infinite" in said and f"layers.1.{layer}.weight" in said
    assert "Download or convert it again" in said


def test_a_tensor_that_is_missing(copied):
    change_weights(copied, lambda tensors: tensors.pop("model.decoder.norm.weight"))
    assert "norm.weight" in refusal(copied)


def test_shapes_of_another_config(copied):
    config = json.loads((copied / CONFIG).read_text())
    config["text_config"]["intermediate_size"] *= 2
    (copied / CONFIG).write_text(json.dumps(config))
    assert "size" in refusal(copied).lower()


def test_what_is_checked_and_what_is_not():
    good = [
        ("counts", torch.tensor([1])),
        ("nothing", torch.empty(0)),
        ("largest", torch.tensor([65504.0] * 9, dtype=torch.half)),
        ("eight bits", torch.tensor([torch.nan]).to(torch.float8_e4m3fn)),
    ]
    assert [name for name, _ in finite(good)] == [name for name, _ in good]
    for value in (torch.inf, -torch.inf, torch.nan):
        with pytest.raises(ValueError, match="in scale"):
            list(finite([*good, ("scale", torch.tensor([0, value], dtype=torch.bfloat16))]))
