"""Drafts from the request's own text: what is found, that it changes no token, and when it pays."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dllm.drafter.prompt_lookup import LONGEST, WINDOW, Lookups, look_up
from dllm.drafter.scheduled import take_scheduled
from dllm.drafter.widths.adaptive import AdaptiveWidth, LookupWidth
from tests.drafter.test_drafter_policy import BAD, Clock, Traffic
from tests.drafter.test_drafter_seeds import PROMPTS, SAMPLED
from tests.support.drafter_harness import (
    FixedCosts,
    drafting_engine,
    greedy,
    make_policy,
    plain_engine,
    policy_of,
    unused_drafts,
)
from tests.support.watched_device import DeviceWatch, off_device, on_device

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


def test_scheduled_drafts_go_to_the_device_without_a_wait():
    """Those of requests of this rank, on the host; what drafts were drawn from is a point."""
    drafts = {"one": [5, 6], "two": [7], "on the device": [-1, -1], "elsewhere": [8, 8]}
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    indices = {"two": 0, "on the device": 1, "one": 2}
    with DeviceWatch() as watch:
        places, logits = on_device((torch.full((3, 2), 9), torch.full((3, 2, 10), 0.5)))
        states = SimpleNamespace(req_id_to_index=indices, draft_tokens=places)
        take_scheduled(states, scheduled, logits)
    assert not watch.findings and off_device(places).tolist() == [[7, 0], [9, 9], [5, 6]]
    found = off_device(logits)
    assert found.exp().argmax(-1)[[0, 2]].tolist() == [[7, 0], [5, 6]]
    assert found[[0, 2]].exp().sum() == 4 and (found[1] == 0.5).all()


def test_the_longest_and_last_match_is_drafted():
    dice = Random(0)
    sizes = (1, 2, 3, 7, 20, 60)
    texts = [dice.choices(range(kinds), k=size) for kinds in (1, 2, 3, 30) for size in sizes]
    for text in texts:
        tokens, length = look_up(np.array(text), N)
        expected, best = looked_up(text, N)
        assert length == best
        assert not best or tokens.tolist() == expected


def test_a_long_text_is_searched_at_its_end_alone():
    for num_between, expected in ((WINDOW - 6, 2), (WINDOW - 4, 0)):
        text = [7, 8, 9, 5, *range(100, 100 + num_between), 7, 8, 9]
        tokens, length = look_up(np.array(text), N)
        assert length == expected
        assert not length or tokens[:2].tolist() == [5, 100]


def request(name: str, tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, all_token_ids=tokens, num_tokens=len(tokens))


def test_confidence_grows_with_the_match_and_is_0_where_the_answer_ends():
    texts = [8, 4, 5, 6, 8], [1, 2, 3, 7, 4, 9, 6, 1, 2, 3, 7], [4, 5, 6]
    found = Lookups(3, [9]).of([request(str(at), text) for at, text in enumerate(texts)])
    expected = [[1 / 5, 2 / 6, 3 / 7], [1 / 2, 0, 6 / 10], [0, 0, 0]]
    np.testing.assert_allclose(found.confidence, expected)
    assert found.tokens[:2].tolist() == [[4, 5, 6], [4, 9, 6]]


def test_a_text_that_goes_on_or_is_another_one_is_looked_up_as_it_is():
    lookups = Lookups(2, [])
    for text, expected in (
        ([5, 6, 7, 5], [6, 7]),
        ([5, 6, 7, 5, 6], [7, 5]),
        ([5, 6, 7, 5, 6, 8, 7], [5, 6]),
        ([3, 1, 2, 3], [1, 2]),
    ):
        assert lookups.of([request("a", text)]).tokens.tolist() == [expected]


# --- a server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(target, drafter):
    return drafting_engine(
        target, drafter, N, {"policy": "adaptive", "prompt_lookup": True}, skip_tokenizer_init=True
    )


class Any(AdaptiveWidth):
    """Takes looked-up drafts in half of the steps, and any widths; counts steps of both kinds."""

    confidence: np.ndarray

    def __init__(self) -> None:
        super().__init__(N, 4, clock=lambda: 0.0)
        self.dice = np.random.default_rng(3)
        self.num_lookups = self.num_passes = 0

    def wants_lookup(self, slots, confidence):
        self.confidence = confidence
        self._looked_up = bool(self.dice.random() < 0.5)
        self.num_lookups += self._looked_up
        return self._looked_up

    def wants_drafts(self, slots):
        return bool(self.dice.random() < 0.9)

    def widths(self, slots, confidence):
        self.num_passes += not self._looked_up
        if self._looked_up:  # a draft source that reads the step's tokens leaves it as it is
            np.testing.assert_array_equal(confidence, self.confidence)
        return self.dice.integers(0, N + 1, len(slots))


@pytest.mark.parametrize("kind", ["any", "adaptive"])
def test_a_seed_gives_the_text_of_plain_decoding(engine, plain, kind):
    policy = Any() if kind == "any" else make_policy(kind, engine)
    with policy_of(engine, policy):
        assert engine.generate(PROMPTS, SAMPLED) == plain.generate(PROMPTS, SAMPLED)
    assert kind == "adaptive" or (policy.num_lookups > 20 and policy.num_passes > 15)


class AnyLookups(LookupWidth, Any):
    """``Any`` of a server without a drafter."""


def test_lookups_without_a_drafter_give_the_text_of_plain_decoding(target, plain):
    options = {"policy": "adaptive", "prompt_lookup": True}
    more = dict(speculative={"method": "ngram"}, skip_tokenizer_init=True)
    engine = drafting_engine(target, target, N, options, **more)
    own, dice = engine.scheduler.driver.policy, AnyLookups()
    assert type(own) is LookupWidth
    for policy in (dice, own):
        with policy_of(engine, policy):
            assert engine.generate(PROMPTS, SAMPLED) == plain.generate(PROMPTS, SAMPLED)
    assert dice.num_lookups > 20
    own.costs = FixedCosts(N, plain=1.0, drafting=9.0, per_block=0.1)
    steps: list[bool] = []
    wants = own.wants_lookup
    own.wants_lookup = lambda *given: steps.append(wants(*given)) or steps[-1]
    assert engine.generate([[2] * 20], greedy(60)) == plain.generate([[2] * 20], greedy(60))
    assert sum(steps) > len(steps) / 2 and len(steps) < 30


def test_prompts_in_chunks_preemptions_and_the_models_end(target, drafter):
    """Few pages, short limits: slots change hands while texts are looked up."""
    limits = dict(max_model_len=160, num_gpu_blocks_override=12, skip_tokenizer_init=True)
    asked = [[1 + i % 3 for i in range(length)] for length in (100, 3, 150, 40, 90, 7)]
    params = [greedy(160 - len(prompt), ignore_eos=True) for prompt in asked]
    plain = plain_engine(target, **limits)
    options = {"policy": "adaptive", "prompt_lookup": True}
    engine = drafting_engine(target, drafter, N, options, **limits)
    with policy_of(engine, Any()):
        assert engine.generate(asked, params) == plain.generate(asked, params)


def test_steps_whose_drafts_nobody_uses_look_nothing_up(engine, plain):
    policy, given = make_policy("adaptive", engine), [2, 5] * 70
    with policy_of(engine, policy):
        assert not unused_drafts(engine, given)
        assert not policy._looked_up
        assert engine.generate([given], greedy(20)) == plain.generate([given], greedy(20))


def test_text_that_repeats_itself_is_drafted_without_the_drafter(engine, plain):
    policy = make_policy("adaptive", engine)
    seen: list[bool] = []
    widths = policy.widths
    policy.widths = lambda *given: seen.append(policy._looked_up) or widths(*given)
    with policy_of(engine, policy):
        assert engine.generate([[2] * 20], greedy(60)) == plain.generate([[2] * 20], greedy(60))
    assert sum(seen) > len(seen) / 2 and len(seen) < 30


# --- the policy -----------------------------------------------------------------------------------


class Texts(Traffic):
    """One request, whose text repeats itself or does not."""

    looked_up = 0
    confidence = np.zeros((1, N))

    def steps_of(self, count: int, conditional: np.ndarray, matches: int, right: bool) -> None:
        """Steps in which a match of so many tokens is found, whose tokens are right or wrong."""
        confidence = (matches + np.arange(N)) / (matches + np.arange(N) + 4)
        self.confidence = np.broadcast_to(confidence * (matches > 0), (1, N))
        for _ in range(count):
            self.step(np.ones(N) * right if self.policy._looked_up else conditional)

    def _choose(self) -> np.ndarray:
        self.last = self.late = np.zeros(1, dtype=int)
        self.has_passed = self.policy.wants_drafts(self.slots)
        if self.has_passed:
            self._get_drafts()
        if self.policy.wants_lookup(self.slots, self.confidence):
            self.looked_up += 1
            self.last = self.policy.widths(self.slots, self.confidence)
        elif self.has_passed:
            self.last = self.policy.widths(self.slots, None)
        return self.last


def texts() -> Texts:
    """A server with one request."""
    traffic = Texts(AdaptiveWidth(N, 1, clock=Clock()), 1)
    traffic.arrive()
    return traffic


def test_long_matches_are_verified_where_the_drafter_does_not_pay():
    traffic = texts()
    traffic.steps_of(100, BAD, 0, False)
    assert not traffic.is_drafting and traffic.looked_up == 0
    traffic.steps_of(100, BAD, 12, True)
    assert traffic.looked_up > 90
    assert not traffic.is_drafting  # what was looked up says nothing of the drafter


def test_matches_that_do_not_go_on_are_given_up_and_tried_for_other_requests():
    traffic, drafter = texts(), np.full(N, 0.5)
    traffic.steps_of(300, drafter, 12, False)
    before = traffic.looked_up
    assert 1 <= before < 75  # a wrong draft costs a twentieth of a step
    traffic.arrive()
    traffic.steps_of(300, drafter, 12, True)
    assert traffic.looked_up > before + 200


def test_a_good_drafter_is_not_displaced_by_short_matches():
    traffic = texts()
    traffic.steps_of(200, np.full(N, 0.95), 1, False)
    assert traffic.looked_up < 10


def test_the_drafter_is_tried_again_while_texts_repeat_themselves():
    traffic = texts()
    traffic.steps_of(100, BAD, 0, False)
    assert not traffic.is_drafting
    traffic.steps_of(300, np.full(N, 0.95), 12, True)
    assert traffic.is_drafting and traffic.looked_up > 200
