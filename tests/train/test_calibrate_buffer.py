"""Calibration from a buffer reads two matrices and a norm of the target, and nothing else."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from dllm import cli
from dllm.drafter.samples import write_shard
from dllm.quantize.checkpoint import INDEX, WEIGHTS
from dllm.settings.command import CommandError
from dllm.train import target as target_module
from dllm.train.target import Target, TargetEmbeddingsAndHead, head_norm
from tests.support.calibrate_cases import TOML, random_samples, target, target_path
from tests.support.drafter_pairs import write_drafter
from tests.support.edited import edited

__all__ = ["target", "target_path"]  # fixtures

TINY = Path(__file__).parents[2] / "checkpoints/tiny-ar"
ENDS = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}


def assert_same(found: TargetEmbeddingsAndHead, whole: Target) -> None:
    for name in ("embedding", "head", "head_norm"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name


@pytest.fixture
def hollow(target_path, tmp_path):
    """A copy of the target in two files, one of which is lost: that with all of its layers."""
    path = tmp_path / "hollow"
    shutil.copytree(target_path, path)
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    save_file({name: tensors[name] for name in ENDS}, path / "ends.safetensors")
    files = {name: "ends.safetensors" if name in ENDS else "lost.safetensors" for name in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": files}))
    return path


def test_a_buffer_trains_without_the_targets_layers(hollow, target, tmp_path):
    assert_same(TargetEmbeddingsAndHead.read(hollow, "cpu"), target)
    (tmp_path / "buffer").mkdir()
    samples = random_samples(target, 30)
    hidden = [target.hidden_states(torch.tensor([one.tokens]), (1, 3))[0] for one in samples]
    write_shard(tmp_path / "buffer/0.safetensors", samples, hidden)
    (tmp_path / "config.toml").write_text(TOML)
    weights = []
    for name, path in (("whole", target.model.name_or_path), ("hollow", hollow)):
        drafter = write_drafter(tmp_path / "drafter")
        arguments = ["--target", path, "--out", tmp_path / name, "--device", "cpu"]
        arguments += ["--config", tmp_path / "config.toml", "--drafter", drafter]
        arguments += ["--from-buffer", tmp_path / "buffer"]
        assert cli.main(["train", "drafter", *map(str, arguments)]) == 0
        weights.append((tmp_path / name / "model/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_of_one_file_only_three_tensors_are_read(target_path, target, monkeypatch):
    read = Mock(wraps=target_module._read)
    monkeypatch.setattr(target_module, "_read", read)
    assert_same(TargetEmbeddingsAndHead.read(target_path, "cpu"), target)
    assert sorted(call.args[2] for call in read.call_args_list) == sorted(ENDS)


def test_a_tied_head_is_the_embedding():
    found = TargetEmbeddingsAndHead.read(TINY, "cpu")
    assert found.head is found.embedding
    assert_same(found, Target(TINY, "cpu"))


def test_names_of_other_families_are_found(target_path, target, tmp_path):
    """As in a checkpoint with a vision tower and a head that predicts several tokens."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)
        for name in ("mtp.embed_tokens.weight", "model.visual.embeddings.weight"):
            tensors[name] = torch.zeros(3)
        tensors["mtp.norm.weight"] = torch.zeros(3)

    path = edited(target_path, tmp_path / "other", rename)
    assert_same(TargetEmbeddingsAndHead.read(path, "cpu"), target)


@pytest.mark.parametrize(
    ("name", "is_packed", "message"),
    [
        ("lm_head.weight", False, "lm_head.weight is quantized .torch.float8_e4m3fn"),
        ("lm_head.weight", True, "its head .lm_head.weight.; similar names: lm_head.weight_packed"),
        ("model.embed_tokens.weight", True, "similar names: model.embed_tokens.weight_packed"),
    ],
)
def test_quantized_ends_are_refused(target_path, tmp_path, name, is_packed, message):

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(name)
        if is_packed:
            tensors[name.replace("weight", "weight_packed")] = torch.zeros(3, dtype=torch.uint8)
        else:
            tensors[name] = weight.to(torch.float8_e4m3fn)

    path = edited(target_path, tmp_path / "quantized", quantize)
    with pytest.raises(CommandError, match=message):
        TargetEmbeddingsAndHead.read(path, "cpu")


def test_other_files_are_refused(target_path, tmp_path):
    path = shutil.copytree(target_path, tmp_path / "pickled")
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(CommandError, match="reads embedding and head from safetensors"):
        TargetEmbeddingsAndHead.read(path, "cpu")


def test_a_file_that_is_missing_is_named(hollow):
    (hollow / "ends.safetensors").unlink()
    with pytest.raises(CommandError, match=r"ends\.safetensors"):
        TargetEmbeddingsAndHead.read(hollow, "cpu")


def test_a_norm_whose_weight_is_around_zero_counts_from_one():
    norm = Qwen3_5RMSNorm(8).requires_grad_(False)
    norm.weight.copy_(torch.linspace(-0.3, 0.4, 8))
    assert torch.equal(head_norm(norm), 1 + norm.weight)
