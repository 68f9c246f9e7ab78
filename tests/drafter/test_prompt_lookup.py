"""Drafts from the request's own text: what is found, that it changes no token, and when it pays."""

from random import Random

import numpy as np
import pytest
import torch

from dllm.drafter.prompt_lookup import (
    LONGEST,
    WINDOW,
    Lookup,
    last_tokens,
    look_up,
    promises_more,
)
from dllm.drafter.widths.policy import FixedWidth, VerifiedStep
from tests.drafter.test_drafter_policy import BAD, Traffic, adaptive
from tests.drafter.test_drafter_seeds import PROMPTS, SAMPLED
from tests.support.drafter_harness import (
    drafting_engine,
    greedy,
    make_policy,
    plain_engine,
    policy_of,
)
from tests.support.drafter_pairs import (
    repeating_config,
    repeating_drafter,
    write_drafter,
    write_repeating_target,
)

N = 5


def looked_up(text: list[int], num_drafts: int) -> tuple[list[int], int]:
    """The definition: the last of the longest matches, and what stood behind it."""
    best, place = 0, None
    for end in range(1, len(text)):  # the match ends in front of this place
        length = 0
        while length < min(end, LONGEST) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best:
            best, place = length, end
    if place is None:
        return [], 0
    behind = text[place:]
    return [behind[i % len(behind)] for i in range(num_drafts)], best


def rows_of(texts: list[list[int]], longest: int) -> torch.Tensor:
    """The texts as vLLM keeps them, each behind what another request left in its slot."""
    table = torch.full((len(texts) + 1, longest), 1, dtype=torch.int32)
    for slot, text in enumerate(texts, 1):
        table[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    slots = torch.arange(1, len(texts) + 1)
    return last_tokens(table, slots, torch.tensor([len(text) for text in texts]))


def test_the_longest_and_last_match_is_drafted():
    dice = Random(0)
    sizes = (1, 2, 3, 7, 20, 60)
    texts = [dice.choices(range(kinds), k=size) for kinds in (1, 2, 3, 30) for size in sizes]
    found = look_up(rows_of(texts, 64), N)
    for text, tokens, length in zip(texts, found.tokens.tolist(), found.lengths, strict=True):
        expected, best = looked_up(text, N)
        assert length == best
        assert not best or tokens == expected


def test_a_long_text_is_searched_at_its_end_alone():
    for num_between, length in ((WINDOW - 6, 2), (WINDOW - 4, 0)):
        text = [7, 8, 9, 5, *range(100, 100 + num_between), 7, 8, 9]
        found = look_up(rows_of([text], 2 * WINDOW), N)
        assert found.lengths.tolist() == [length]
        assert not length or found.tokens[0, :2].tolist() == [5, 100]


def test_confidence_grows_with_the_match_and_is_0_where_the_answer_ends():
    tokens = torch.tensor([[4, 5, 6], [4, 9, 6], [4, 5, 6]])
    found = Lookup(tokens, torch.tensor([1, 3, 0]))
    expected = [[2 / 3, 3 / 4, 4 / 5], [4 / 5, 0, 6 / 7], [0, 0, 0]]
    confidence = found.confidence(torch.tensor([9]))
    torch.testing.assert_close(confidence, torch.tensor(expected))
    other = torch.tensor([[0.6, 0.6, 0.6], [0.9, 0.1, 0.1], [0.1, 0.0, 0.0]])
    assert promises_more(confidence, other).tolist() == [True, False, False]


# --- a server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_repeating_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target, tmp_path_factory):
    folder = write_drafter(
        tmp_path_factory.mktemp("drafter"), repeating_config(), repeating_drafter()
    )
    return drafting_engine(target, folder, N, {"prompt_lookup": True}, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def plain(target):
    return plain_engine(target, skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", ["5", "random", "adaptive", "pilot"])
def test_a_seed_gives_the_text_of_plain_decoding(engine, plain, kind):
    with policy_of(engine, make_policy(kind, engine)):
        assert engine.generate(PROMPTS, SAMPLED) == plain.generate(PROMPTS, SAMPLED)


class Watching(FixedWidth):
    """Full width; what was verified, and for how many rows the drafter did not run."""

    reads_outcomes = reads_confidence = True
    accepted = steps = free = 0

    def observe(self, step: VerifiedStep) -> None:
        self.accepted += int(step.accepted.sum())
        self.steps += int((step.verified > 0).sum())

    def widths(self, slots, confidence, looked_up=None, passes=True) -> np.ndarray:
        assert passes or looked_up is not None
        self.free += 0 if passes else len(slots)
        return super().widths(slots, confidence)


def test_text_that_repeats_itself_is_drafted_without_the_drafter(engine, plain):
    params = greedy(60)
    with policy_of(engine, Watching(N)) as seen:
        assert engine.generate([[2] * 20], params) == plain.generate([[2] * 20], params)
    assert seen.free > seen.steps / 2
    assert seen.accepted > 4 * seen.steps


# --- the policy -----------------------------------------------------------------------------------


def test_repeats_are_verified_where_the_drafter_does_not_pay_and_teach_nothing_about_it():
    policy = adaptive(1)
    traffic = Traffic(policy, 1)
    traffic.arrive()
    for _ in range(100):
        traffic.step(BAD)
    assert not policy.is_drafting
    slots, nobody, everyone = np.arange(1), np.zeros(1, dtype=bool), np.ones(1, dtype=bool)
    before = policy.survival.of(slots)
    for _ in range(30):
        policy.clock.now += 0.01
        widths = policy.widths(slots, None, everyone, passes=False)
        policy.observe(VerifiedStep(slots, nobody, everyone, widths, widths))
    assert widths.tolist() == [policy.num_drafts]
    assert not policy.is_drafting
    np.testing.assert_array_equal(policy.survival.of(slots), before)
