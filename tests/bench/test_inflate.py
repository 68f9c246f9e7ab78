"""A deeper copy of tiny-ar gives its logits to the last bit, and its drafter drafts the same."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bench.inflate import DRAFTER, TARGET, write_drafter, write_target
from tests.support.drafter_harness import drafting_engine, greedy, watch_drafts

PROMPT = [(21 + 7 * index) % 450 for index in range(40)]
DEPTH = 12


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deeper")
    write_target(out / "target", DEPTH)
    write_drafter(out / "drafter", DEPTH)
    return out


def logits(model: Path, dtype: torch.dtype) -> torch.Tensor:
    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        return loaded(torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal_to_the_last_bit(deeper: Path, dtype: torch.dtype) -> None:
    found = logits(deeper / "target", dtype)
    assert torch.equal(found, logits(TARGET, dtype))
    assert found.argmax(-1).unique().numel() > 3  # not one token everywhere


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_engine_tokens_and_drafts_are_the_same(deeper: Path, dtype: str) -> None:
    runs = []
    for target, drafter in ((TARGET, DRAFTER), (deeper / "target", deeper / "drafter")):
        engine = drafting_engine(target, drafter, 7, dtype=dtype)
        with watch_drafts(engine) as seen:
            tokens = engine.generate([PROMPT], greedy(40))
        runs.append((tokens, seen))
    (tokens, drafts), (tokens_deeper, drafts_deeper) = runs
    assert tokens_deeper == tokens
    assert len(drafts_deeper) == len(drafts) < 40
    for one, other in zip(drafts, drafts_deeper, strict=True):
        assert (one.tokens, one.drafts) == (other.tokens, other.drafts)
        assert torch.equal(one.logits, other.logits)


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    write_target(tmp_path / "target", 2)
    kept = Qwen3ForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    whole = Qwen3ForCausalLM.from_pretrained(TARGET).state_dict()
    assert {name for name in whole if "layers." in name and name.split(".")[2] in "01"} < set(kept)
    assert all(torch.equal(one, whole[name]) for name, one in kept.items())
