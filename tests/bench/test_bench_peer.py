"""Blocks with transformers' cache are those without it; the command at a tiny size."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import peer
from bench.context import read_csv
from bench.peer import Peer
from dllm.models.unmasking.reference import generate_blocks
from tests.support.family_checkpoints import SDAR


def test_blocks_with_a_cache_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    """In fp32: tokens of nearly equal logits may change places otherwise."""
    (tmp_path / "config.json").write_text(json.dumps(SDAR))
    (tmp_path / "generation_config.json").write_text(json.dumps({"threshold": 1.0}))
    torch.manual_seed(0)
    one = Peer(tmp_path)
    one.model.float()
    one.rule = replace(one.rule, stop_ids=())
    prompt = list(range(20, 28))
    expected = generate_blocks(one.model, [prompt], one.rule, max_tokens=16)
    assert expected.num_steps == 16  # one token in each
    assert one.answer(prompt, 16) == expected.answers[0]


def test_both_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "CONFIG", SDAR | {"max_position_embeddings": 1024})
    monkeypatch.setattr(peer, "FLAGS", (*peer.FLAGS, "--enforce-eager"))  # compiles nothing
    options = ["--rounds", "2", "--input-len", "8", "--output-len", "8", "16"]
    assert peer.main([*options, "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / peer.SECTION.file)
    assert [row["contestant"] for row in rows] == ["ours", "transformers"] * 2 + [
        "transformers",
        "ours",
    ] * 2
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    assert "| 16 | transformers |" in capsys.readouterr().out
