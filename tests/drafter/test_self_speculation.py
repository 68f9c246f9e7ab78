"""A model that drafts for itself, and the same model token by token, on random weights.

The reference of both is transformers' Ministral 3: its ``generate``, and one pass in which the last
token and the masks behind it see each other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Ministral3ForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.models.unmasking.reference import load_model
from dllm.ops.schedule import reveal_counts
from tests.support.drafter_harness import (
    assert_close,
    greedy,
    make_policy,
    policy_of,
    take_counts,
    unused_drafts,
    watch_drafts,
)
from tests.support.engine_harness import Engine, assert_same_logprobs, get_engine
from tests.support.family_checkpoints import MASK, NEMOTRON
from tests.support.masked_pass import logits_of, random_prompts

CANVAS = NEMOTRON["block_size"]
NUM_DRAFTS = CANVAS - 1
PROMPTS = random_prompts([150, 5, 31, 120, 64, 200], seed=2)
# Prompts in chunks, batches that do not fit, and pages for two long requests.
LIMITS = dict(max_num_batched_tokens=192, max_num_seqs=4, max_model_len=288, block_size=32)


@pytest.fixture(scope="module")
def path(family: Callable[[str], Path]) -> Path:
    return family("nemotron")


@pytest.fixture(scope="module")
def model(path: Path) -> Ministral3ForCausalLM:
    return load_model(path)


def serving(path: Path, decoding: str, **more: Any) -> Engine:
    return get_engine(path, additional_config={"dllm": {"decoding": decoding}}, **LIMITS, **more)


@pytest.fixture(scope="module")
def plain(path: Path) -> Engine:
    return serving(path, "ar")


@pytest.fixture(scope="module")
def drafting(path: Path) -> Engine:
    return serving(path, "self_speculation", num_gpu_blocks_override=14)


def continued(model: Ministral3ForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    options = dict(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = model.generate(torch.tensor([prompt]), **options)[0]
    return ids[len(prompt) :].tolist()


def test_token_by_token_it_is_the_model_of_transformers(plain: Engine, model) -> None:
    expected = [continued(model, prompt, 40) for prompt in PROMPTS]
    assert plain.generate(PROMPTS, greedy(40)) == expected


def test_a_config_without_a_canvas_serves_it_so_too(path: Path, plain: Engine) -> None:
    """As in vLLM, which has the model but not the option."""
    engine = get_engine(path, hf_overrides={"canvas_length": None}, **LIMITS)
    assert engine.generate(PROMPTS, greedy(9)) == plain.generate(PROMPTS, greedy(9))


def test_drafts_are_those_of_a_pass_over_masks(drafting: Engine, model) -> None:
    """In mixed batches, and up to the end of the model's context."""
    with watch_drafts(drafting) as seen:
        drafting.generate([*PROMPTS[1:3], PROMPTS[5]], greedy(60))
    assert len(seen) > 100
    for draft in seen[::11]:
        start = len(draft.tokens) - 1
        canvas = [draft.tokens[-1], *[MASK] * NUM_DRAFTS]
        if start + CANVAS > LIMITS["max_model_len"]:
            continue  # masks behind the context are drafts that nobody verifies
        expected = logits_of(model, draft.tokens[:-1] + canvas, start)[start + 1 :]
        expected[:, MASK] = -torch.inf
        assert_close(draft.logits, expected)
        assert draft.drafts == expected.argmax(-1).tolist()


SAMPLED = [
    greedy(60, temperature=1.0, seed=5),
    greedy(60, temperature=0.7, seed=6, top_p=0.9, logprobs=3),
    greedy(60, temperature=1.5, seed=7, min_p=0.02, logit_bias={40: 3.0}),
    greedy(60, presence_penalty=0.5, min_tokens=4),
    SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-){3,6}[0-9]{2}"),
    ),
    greedy(60, stop_token_ids=list(range(300, 340))),
]


def served_alike(
    plain: Engine, drafting: Engine, given: list[list[int]], kind: str
) -> tuple[list[Any], list[Any]]:
    """Twice, preempted, the second time from cached prefixes; what both gave in the end."""
    expected = plain.outputs(given, SAMPLED)
    preempt = drafting.scheduler._preempt_request
    with (
        policy_of(drafting, make_policy(kind, drafting)),
        mock.patch.object(drafting.scheduler, "_preempt_request", wraps=preempt) as preempted,
    ):
        for _ in range(2):
            found = drafting.outputs(given, SAMPLED)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
                assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
    assert preempted.called, "the cache was large enough for everybody"
    return found, expected


@pytest.mark.parametrize("kind", [str(NUM_DRAFTS), "random", "pilot"])
def test_the_text_is_the_one_token_by_token(plain, drafting, kind) -> None:
    """Greedy and seeded, with grammars and logprobs."""
    found, expected = served_alike(plain, drafting, PROMPTS, kind)
    assert_same_logprobs(found[1].outputs[0].logprobs, expected[1].outputs[0].logprobs)


@pytest.mark.parametrize("num_steps", [2, 4])
def test_several_passes_give_the_same_text(plain, drafting, num_steps, monkeypatch) -> None:
    """Each of them is a pass over the canvas."""
    speculator = drafting.runner.speculator
    run = mock.Mock(wraps=speculator._run_model)
    monkeypatch.setattr(speculator, "_run_model", run)
    counts = reveal_counts("cosine", NUM_DRAFTS, num_steps)
    monkeypatch.setattr(speculator, "reveal_counts", counts)
    few = slice(1, 4)
    expected = plain.generate(PROMPTS[few], SAMPLED[few])
    drafting.reset_prefix_cache()
    take_counts(drafting)
    assert drafting.generate(PROMPTS[few], SAMPLED[few]) == expected
    assert run.call_count == num_steps * take_counts(drafting)["draft_passes", ""] > 0


def test_steps_whose_drafts_nobody_uses_count_nothing(plain: Engine, drafting: Engine) -> None:
    drafting.reset_prefix_cache()
    given = PROMPTS[5]
    assert not unused_drafts(drafting, given)
    behind = [*given, 30]
    assert drafting.generate([behind], greedy(20)) == plain.generate([behind], greedy(20))


def test_the_context_stays_exact_up_to_the_end_of_the_model(
    plain: Engine, drafting: Engine
) -> None:
    """Canvases that begin in the last page would reach behind it."""
    given = PROMPTS[5] + PROMPTS[4][:40]
    length = LIMITS["max_model_len"] - len(given)
    assert drafting.generate([given], greedy(length)) == plain.generate([given], greedy(length))
