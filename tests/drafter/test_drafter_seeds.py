"""With a drafter, a seed gives the text of plain decoding, whatever was drafted and verified."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dllm.drafter.verification import keep_own_tokens
from dllm.drafter.widths.policy import FixedWidth
from dllm.ops.schedule import reveal_counts
from tests.support.drafter_harness import (
    AllDrafts,
    drafting_engine,
    greedy,
    make_policy,
    plain_engine,
    policy_of,
)
from tests.support.engine_harness import Engine

NUM_DRAFTS = 5
METHODS = ("greedy", "probabilistic")
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [3, 3, 3, 4], [2] * 70]
SAMPLED = [
    greedy(60, temperature=2.0, seed=seed, **more)
    for seed, more in ((5, {}), (6, {"top_k": 5}), (7, {"top_p": 0.8}), (8, {"min_p": 0.05}))
]


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    engine = plain_engine(target, skip_tokenizer_init=True)
    return engine.generate(PROMPTS, SAMPLED)


def drafting(target: Path, drafter: Path, method: str) -> Engine:
    """The engine with this ``draft_sample_method``."""
    speculative = {"draft_sample_method": method}
    options = dict(skip_tokenizer_init=True, speculative=speculative)
    return drafting_engine(target, drafter, NUM_DRAFTS, **options)


@pytest.fixture(scope="module", params=METHODS)
def engine(request, target, drafter) -> Engine:
    return drafting(target, drafter, request.param)


@pytest.mark.parametrize("kind", ["5", "0", "random", "adaptive", "pilot"])
def test_a_seed_gives_the_text_of_plain_decoding(engine, plain, kind):
    with policy_of(engine, make_policy(kind, engine)):
        assert engine.generate(PROMPTS, SAMPLED) == plain


@pytest.mark.parametrize("num_steps", [2, 4])
def test_several_passes_give_the_same_text(engine, plain, num_steps, monkeypatch):
    counts = reveal_counts("linear", NUM_DRAFTS, num_steps)
    assert len(counts) == num_steps
    monkeypatch.setattr(engine.runner.speculator, "reveal_counts", counts)
    assert engine.generate(PROMPTS, SAMPLED) == plain


def test_own_tokens_are_kept_up_to_the_first_that_differs():
    own = torch.tensor([7, 8, 9, 1, 5, 6, 4])
    inputs = torch.tensor([0, 7, 8, 3, 2, -1, 6])  # -1: must not be kept
    starts = torch.tensor([0, 3, 4, 7])
    tokens, num_emitted = keep_own_tokens(own, inputs, starts, 3)
    assert num_emitted.tolist() == [3, 1, 1] and num_emitted.dtype == torch.int32
    emitted = [row[:count] for row, count in zip(tokens.tolist(), num_emitted, strict=True)]
    assert emitted == [[7, 8, 9], [1], [5]]
    assert tokens.shape == (3, 4)


def test_sampled_drafts_are_kept_more_often_than_likeliest_ones(target, drafter):
    """At temperature 2 the likeliest token is not likely."""
    rates = {}
    for method in METHODS:
        engine = drafting(target, drafter, method)
        with policy_of(engine, AllDrafts(NUM_DRAFTS)) as seen:
            params = [greedy(60, temperature=2.0, seed=seed) for seed in range(16)]
            engine.generate(PROMPTS * 4, params)
        rates[method] = seen.num("accepted") / seen.num("verified")
    assert rates["probabilistic"] > rates["greedy"] + 0.02, rates


def test_the_drafters_distributions_are_not_kept(engine):
    """vLLM allocates ``[requests, N, vocabulary]`` logits for sampled drafts."""
    assert engine.runner.speculator.draft_logits is None


def test_how_sure_the_drafter_is_says_nothing_of_what_was_drawn(engine, monkeypatch):
    """The same distributions with other random numbers: other drafts, the same confidence."""
    speculator = engine.runner.speculator
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Reading(FixedWidth):
        reads_confidence = True

        def wants_drafts(self, slots: np.ndarray) -> bool:
            return True

        def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
            assert confidence is not None
            seen.append((speculator.draft_tokens[: len(slots)].clone(), confidence.copy()))
            return super().widths(slots, confidence)

    for shift in (0, 1000):
        sample = speculator.sample_draft
        with monkeypatch.context() as patch, policy_of(engine, Reading(NUM_DRAFTS, 0)):
            patch.setattr(
                speculator,
                "sample_draft",
                lambda hidden, positions, *rest, sample=sample, shift=shift, **options: sample(
                    hidden, positions + shift, *rest, **options
                ),
            )
            engine.generate([PROMPTS[0]], greedy(12, temperature=2.0, seed=3))
    half = len(seen) // 2
    drafts = [torch.cat([each for each, _ in part]) for part in (seen[:half], seen[half:])]
    confidence = [np.concatenate([each for _, each in part]) for part in (seen[:half], seen[half:])]
    np.testing.assert_array_equal(*confidence)
    is_sampled = engine.runner.speculator._samples_drafts
    assert bool((drafts[0] == drafts[1]).all()) is not is_sampled
