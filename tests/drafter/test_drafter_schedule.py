"""Schedules reveal every token once, in the order that their names promise; policies answer."""

import itertools

import numpy as np
import pytest
import torch

from dllm.drafter.schedule import MASKED_FRACTION, reveal_counts, reveal_surest
from dllm.drafter.widths.choice import make_policy
from dllm.settings.drafting import NOISE_SCHEDULES, DrafterOptions, always_verifies_all


@pytest.mark.parametrize("schedule", NOISE_SCHEDULES)
@pytest.mark.parametrize("num_drafts", [1, 2, 7, 16])
def test_every_pass_reveals_something_and_all_of_them_everything(schedule, num_drafts):
    for steps in range(1, num_drafts + 1):
        counts = reveal_counts(schedule, num_drafts, steps)
        assert sum(counts) == num_drafts
        assert min(counts) >= 1 and len(counts) <= steps
    assert reveal_counts(schedule, num_drafts, 1) == [num_drafts]


@pytest.mark.parametrize("schedule", NOISE_SCHEDULES)
def test_the_masked_fraction_falls_from_one_to_nothing(schedule):
    fractions = [MASKED_FRACTION[schedule](t) for t in np.linspace(0, 1, 9)]
    assert fractions[0] == 1.0
    assert fractions[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(before > after for before, after in itertools.pairwise(fractions))


def test_the_counts_of_the_seed_document():
    assert reveal_counts("cosine", 16, 4) == [6, 5, 3, 2]
    assert reveal_counts("linear", 16, 4) == [4, 4, 4, 4]
    assert reveal_counts("sqrt", 16, 4) == [2, 2, 3, 9]


def test_the_surest_positions_are_revealed_with_their_likeliest_tokens():
    probabilities = torch.tensor(
        [
            [[0.6, 0.4, 0.0], [0.1, 0.0, 0.9], [0.2, 0.8, 0.0]],
            [[1.0, 0, 0], [0, 1.0, 0], [0.5, 0.5, 0]],
        ]
    )
    drafts, confidence = torch.full((2, 3), -1), torch.zeros(2, 3)
    is_masked = torch.tensor([[True, True, True], [False, True, True]])
    reveal_surest(drafts, confidence, is_masked, probabilities.log(), count=2)
    assert drafts.tolist() == [[-1, 2, 1], [-1, 1, 0]]
    assert is_masked.tolist() == [[True, False, False], [False, False, False]]
    torch.testing.assert_close(confidence, torch.tensor([[0, 0.9, 0.8], [0, 1.0, 0.5]]))


def test_the_fixed_policy():
    slots = np.array([4, 0, 2])
    for width, expected in ((None, 7), (3, 3), (0, 0)):
        options = DrafterOptions(width=width)
        policy = make_policy(options, 7, num_slots=5)
        assert policy.wants_drafts(slots) is (expected > 0)
        assert policy.widths(slots, None).tolist() == [expected] * 3
        assert always_verifies_all(options, 7) == (expected == 7)
