"""SDAR and LLaDA2 in transformers: weight names, the config, and generation block after block."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dllm.models.llada2 import reference as llada2
from dllm.models.unmasking.reference import DecodingRule, load_model
from tests.support.edited import edited
from tests.support.family_checkpoints import EOS, LLADA2, MASK, SDAR, SDAR_MOE, write
from tests.support.llada2_names import to_released

# --------------------------------------------------------------------------------------------------
# Names and shapes


def test_released_names_come_back(tmp_path: Path) -> None:
    """Every tensor of the checkpoint, bit for bit, after Glm4Moe's own state."""
    path = write(tmp_path / "model", LLADA2)
    model = llada2.load_reference(path)
    before = load_file(path / "model.safetensors")
    after = to_released(model.state_dict(), LLADA2)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    config = LLADA2 | {"tie_word_embeddings": True}
    path = write(tmp_path / "model", config)
    model = llada2.load_reference(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    released = to_released(model.state_dict(), config)
    assert "lm_head.weight" not in released and "model.word_embeddings.weight" in released


def test_the_fused_matrix_holds_queries_then_keys_then_values() -> None:
    """Four query heads, two key heads of 32: rows 0 to 127, 128 to 191, 192 to 255."""
    name = "model.layers.0.attention.query_key_value.weight"
    fused = torch.arange(256)[:, None].expand(256, 64)
    untied = LLADA2 | {"tie_word_embeddings": False}
    split = llada2.from_released({name: fused}, untied)
    first = {part: split[f"model.layers.0.self_attn.{part}_proj.weight"][:, 0] for part in "qkv"}
    assert {part: (int(rows[0]), len(rows)) for part, rows in first.items()} == {
        "q": (0, 128),
        "k": (128, 64),
        "v": (192, 64),
    }


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    """Ten of them, whose names do not sort like numbers; gate above up."""
    names = [(e, p) for e in range(10) for p in ("gate", "up", "down")]
    experts = {
        f"model.layers.1.mlp.experts.{e}.{p}_proj.weight": torch.full((2, 3), 10.0 * e + len(p))
        for e, p in sorted(names, key=str)
    }
    stacked = llada2.from_released(experts, LLADA2 | {"tie_word_embeddings": False})
    both = stacked["model.layers.1.mlp.experts.gate_up_proj"]
    assert both.shape == (10, 4, 3)
    assert both[:, 0, 0].tolist() == [10.0 * e + 4 for e in range(10)]
    assert both[:, 2, 0].tolist() == [10.0 * e + 2 for e in range(10)]


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.2.mlp.gate.expert_bias"])
def test_a_missing_weight_is_refused(missing: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", LLADA2)
    path = edited(whole, tmp_path / "model", lambda tensors: tensors.pop(missing))
    with pytest.raises(RuntimeError, match="Missing key"):
        llada2.load_reference(path)


def test_experts_decide_which_qwen3_it_is(tmp_path: Path) -> None:
    dense = load_model(write(tmp_path / "dense", SDAR))
    moe = load_model(write(tmp_path / "moe", SDAR_MOE))
    assert [type(model).__name__ for model in (dense, moe)] == [
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ]


# --------------------------------------------------------------------------------------------------
# Generation


def test_the_rule_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Values of both files; what they leave out has the value that a server takes."""
    path = write(tmp_path / "model", LLADA2)
    for generation, expected in (
        ({"eos_token_id": 1}, (0.95, None)),
        ({"eos_token_id": [1], "threshold": 0.7, "editing": 1}, (0.7, 0.5)),
        ({"eos_token_id": [1], "editing": 1, "editing_threshold": 0.9}, (0.95, 0.9)),
        ({"eos_token_id": [1], "editing": 0, "editing_threshold": 0.9}, (0.95, None)),
    ):
        (path / "generation_config.json").write_text(json.dumps(generation))
        rule = DecodingRule.of_checkpoint(path)
        assert (rule.threshold, rule.editing_threshold) == expected
        assert (rule.block_size, rule.mask_token_id, rule.stop_ids) == (32, MASK, (EOS,))


def test_a_released_config_may_leave_out_what_all_of_them_share(tmp_path: Path) -> None:
    left_out = ("block_size", "mask_token_id")
    path = write(tmp_path / "model", {k: v for k, v in LLADA2.items() if k not in left_out})
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    rule = DecodingRule.of_checkpoint(path)
    assert (rule.block_size, rule.mask_token_id) == (32, 156895)
