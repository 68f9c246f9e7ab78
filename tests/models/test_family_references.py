"""SDAR and LLaDA2 in transformers: weight names, the config, and generation block after block."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.models.llada2 import reference as llada2
from dllm.models.sdar import reference as sdar
from dllm.models.unmasking.reference import (
    DecodingRule,
    _is_settled,
    additive,
    block_causal,
    decide,
    generate_blocks,
)
from tests.support.family_checkpoints import EOS, LLADA2, MASK, SDAR, SDAR_MOE, write

RULE = DecodingRule(block_size=4, mask_token_id=MASK, stop_ids=(EOS,), threshold=0.9)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random SDAR of blocks of 4, in transformers."""
    return sdar.load_reference(write(tmp_path_factory.mktemp("sdar") / "model", SDAR, seed=1))


# --------------------------------------------------------------------------------------------------
# Names and shapes


def test_released_names_come_back(tmp_path: Path) -> None:
    """Every tensor of the checkpoint, bit for bit, after Glm4Moe's own state."""
    path = write(tmp_path / "model", LLADA2)
    model = llada2.load_reference(path)
    before = load_file(path / "model.safetensors")
    after = llada2.to_released(model.state_dict(), LLADA2)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    config = LLADA2 | {"tie_word_embeddings": True}
    path = write(tmp_path / "model", config)
    model = llada2.load_reference(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    released = llada2.to_released(model.state_dict(), config)
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
    path = write(tmp_path / "model", LLADA2)
    tensors = load_file(path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        llada2.load_reference(path)


def test_experts_decide_which_qwen3_it_is(tmp_path: Path) -> None:
    dense = sdar.load_reference(write(tmp_path / "dense", SDAR))
    moe = sdar.load_reference(write(tmp_path / "moe", SDAR_MOE))
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


@pytest.mark.parametrize("size", [4, 8])
def test_blocks_are_cut_at_absolute_positions(small, size: int) -> None:
    """A canvas ends at a multiple of B, so answers differ in length by the prompt's tail."""
    prompts = [list(range(10, 10 + n)) for n in range(1, 2 * size + 1)]
    rule = replace(RULE, block_size=size, stop_ids=())
    answers = generate_blocks(small, prompts, rule, max_tokens=size + 1).answers
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (len(prompt) + len(answer)) % size == 0
        assert size + 1 <= len(answer) <= 2 * size
        assert MASK not in answer


def test_answers_do_not_depend_on_the_batch(small) -> None:
    prompts = [list(range(20, 20 + n)) for n in (1, 4, 6, 11)]
    together = generate_blocks(small, prompts, RULE, max_tokens=12)
    alone = [generate_blocks(small, [prompt], RULE, max_tokens=12) for prompt in prompts]
    assert together.answers == [each.answers[0] for each in alone]
    assert together.num_steps == sum(each.num_steps for each in alone)
    assert together.num_blocks == sum(each.num_blocks for each in alone)


def test_a_step_decides_all_above_the_threshold_and_at_least_one(small) -> None:
    prompt = [[30, 31, 32, 33]]
    rule = replace(RULE, stop_ids=())
    at_once = generate_blocks(small, prompt, replace(rule, threshold=-1.0), max_tokens=8)
    one_by_one = generate_blocks(small, prompt, replace(rule, threshold=1.0), max_tokens=8)
    assert (at_once.num_steps, one_by_one.num_steps) == (2, 8)
    assert at_once.num_blocks == one_by_one.num_blocks == 2


def test_one_by_one_is_the_surest_mask_each_time(small) -> None:
    """Against a loop over single positions."""
    ids, size = [40, 41, 42, 43, 44, 45], 4
    rule = replace(RULE, threshold=1.0, stop_ids=())
    (answer,) = generate_blocks(small, [ids], rule, max_tokens=2).answers
    canvas = [MASK, MASK]
    mask = additive(block_causal(torch.arange(8), size)[None])
    for _ in canvas:
        with torch.no_grad():
            logits = small(input_ids=torch.tensor([ids + canvas]), attention_mask=mask).logits[0]
        logits[:, MASK] = -torch.inf
        top = logits.softmax(dim=-1)[6:]
        place = max((p for p in (0, 1) if canvas[p] == MASK), key=lambda p: float(top[p].max()))
        canvas[place] = int(top[place].argmax())
    assert answer == canvas


def test_nothing_is_decided_behind_a_stop_token() -> None:
    """Of five positions the last stands behind it; the one in front of it keeps the canvas open."""
    rule = replace(RULE, stop_ids=(7,))
    canvas = torch.ones(3, 3, dtype=torch.bool)
    after = torch.tensor([[5, 7, MASK], [MASK, 7, 5], [5, 6, 6]])
    before = torch.full_like(after, MASK)
    no = torch.zeros(3, dtype=torch.bool)
    assert _is_settled(before, after, canvas, no, rule).tolist() == [True, False, True]
    editing = replace(rule, editing_threshold=0.5)
    assert _is_settled(before, after, canvas, no, editing).tolist() == [True, False, False]
    assert _is_settled(after, after, canvas, ~no, editing).tolist() == [False, False, True]


def test_editing_replaces_a_decided_token_above_its_own_threshold() -> None:
    likely = [[0.1, 0.8, 0.1, 0.0], [0.1, 0.3, 0.6, 0.0], [0.9, 0.05, 0.05, 0.0]]
    logits = torch.tensor([likely]).log()
    ids = torch.tensor([[0, 0, 1]])
    canvas = torch.tensor([[True, True, False]])  # the last is no canvas
    rule = DecodingRule(4, 3, (), threshold=0.9, editing_threshold=0.7)
    after, edited = decide(logits.clone(), ids, canvas, rule)
    assert after.tolist() == [[1, 0, 1]] and edited.tolist() == [True]
    after, edited = decide(logits.clone(), ids, canvas, replace(rule, editing_threshold=None))
    assert after.tolist() == [[0, 0, 1]] and edited.tolist() == [False]
