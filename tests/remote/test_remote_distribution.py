"""Drafts that came over a bad network leave the target's distribution as it is, at temperature 1.

The target, the rule and the test are those of ``test_drafter_distribution.py``, which says what the
chi-square test finds. Drafts come from a worker through the messages, sessions and deadlines of
``dllm.remote``: late, never asked for, wrong, and as many as have come. More than the distribution
holds: each request gets the tokens that plain decoding draws.
"""

import numpy as np
import pytest

from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.remote.client import Wish
from tests.drafter.test_drafter_distribution import (
    LENGTH,
    LEVEL,
    LOGITS,
    NUM_DRAFTS,
    NUM_PROMPTS,
    OFFSETS,
    RIGHT,
    VOCAB,
    Step,
    counts,
    cpu_kernels,  # noqa: F401  a fixture
    decode,
    p_value,
    verify,
)
from tests.support.drafter_harness import FixedCosts
from tests.support.oracle import Oracle
from tests.support.remote_harness import TICK_S, Clock, Net, Target, outcome, worker

NUM_SAMPLES, NUM_SLOTS = 24_000, 400


class Knowing(Oracle):
    """The likeliest token behind each prefix, or the least likely one now and then."""

    vocab_size = VOCAB

    def step(self) -> list[tuple[str, list[int], bool]]:
        found = []
        for run, (tokens, left) in list(self.runs.items()):
            number = 0
            for token in tokens:
                number = number * VOCAB + token
            logits = LOGITS[OFFSETS[min(len(tokens) - 1, len(OFFSETS) - 1)] + number % len(LOGITS)]
            token = int((logits if self.random.random() < self.alpha else -logits).argmax())
            self.runs[run] = [*tokens, token], left - 1
            found.append((run, [token], left == 1))
            if left == 1:
                del self.runs[run]
        return found


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_the_first_three_tokens_have_the_targets_distribution(policy):
    clock = Clock()
    drafts = worker(clock, max_sessions=NUM_SLOTS * 3 // 4)  # some are forgotten all the time
    drafts._drafts = Knowing(alpha=0.8)
    net = Net(drafts, clock, delay_s=0.0005, jitter_s=0.008, full=0.05, draft_s=0.0005)
    widths: WidthPolicy = FixedWidth(NUM_DRAFTS)
    if policy == "adaptive":
        widths = AdaptiveWidth(NUM_DRAFTS, NUM_SLOTS, reads_confidence=False, clock=clock)
        # Plain steps are dear, so that drafting never stops, and each draft costs something.
        widths.costs = FixedCosts(NUM_DRAFTS, plain=3.0, drafting=1.0, per_block=0.5)
    target = Target([net], clock, NUM_DRAFTS, deadline_s=0.02, policy=widths, num_slots=NUM_SLOTS)
    drafter = target.drafter
    drafter.client._vocab_size = VOCAB
    found = np.full(NUM_SAMPLES, -1)
    texts: dict[int, list[int]] = {}
    kept: dict[int, list[int]] = {}
    begun, accepted = 0, 0
    while len(texts) or begun < NUM_SAMPLES:
        while len(texts) < NUM_SLOTS and begun < NUM_SAMPLES:
            texts[begun], kept[begun] = [begun % NUM_PROMPTS], []
            begun += 1
        requests = np.array(list(texts))
        tokens, num_sampled = verify(step_of(texts, kept))
        verified = {str(request): len(drafts) for request, drafts in kept.items()}
        in_prompt = np.array([len(text) == 1 for text in texts.values()])
        wishes = {}
        for request, drawn, count in zip(requests.tolist(), tokens, num_sampled, strict=True):
            text = texts[request]
            text += drawn[: min(count, LENGTH + 1 - len(text))].tolist()
            accepted += int(count) - 1
            limit = max(0, LENGTH - len(text))  # a draft, and the target's own token behind it
            wishes[str(request)] = Wish(text, limit)
            if len(text) == LENGTH + 1:
                found[request] = number_of(texts.pop(request))
        drafter.client.end(drafter.client.names - set(map(str, texts)))
        clock.now += 50 * TICK_S
        drafter.follow(outcome(drafter, list(wishes), in_prompt, num_sampled, verified), wishes)
        names, taken = drafter.take()
        kept = {int(name): each for name, each in zip(names, taken, strict=True)}
    assert accepted > NUM_SAMPLES / 10 and target.count("drafts") > 1.2 * accepted
    np.testing.assert_array_equal(found, decode(NUM_SAMPLES))
    assert p_value(counts(found), RIGHT) > LEVEL


def number_of(text: list[int]) -> int:
    number = text[0]
    for token in text[1:]:
        number = number * VOCAB + token
    return number


def step_of(texts: dict[int, list[int]], kept: dict[int, list[int]]) -> Step:
    """The drafts of each request, to be verified together."""
    requests = np.array(list(texts))
    lengths = np.array([len(text) - 1 for text in texts.values()])
    drafts = np.zeros((len(requests), NUM_DRAFTS), dtype=np.int64)
    widths = np.array([len(kept[request]) for request in texts])
    for row, request in enumerate(texts):
        drafts[row, : widths[row]] = kept[request]
    prefixes = [np.array([number_of(text) for text in texts.values()])]
    for place in range(NUM_DRAFTS):
        prefixes.append(prefixes[-1] * VOCAB + drafts[:, place])
    logits = np.zeros((*drafts.shape, VOCAB), dtype=np.float32)  # nobody reads it
    numbers = np.stack(prefixes, 1)
    return Step(requests % NUM_SLOTS, requests, lengths, numbers, drafts, logits, widths)
