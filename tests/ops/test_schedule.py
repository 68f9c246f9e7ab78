"""Schedules reveal every mask once, in the order that their names promise."""

import itertools
import math

import pytest

from dllm.ops.schedule import SCHEDULES, reveal_counts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_every_step_reveals_something_and_all_of_them_everything(schedule, size):
    for steps in range(1, size + 1):
        counts = reveal_counts(schedule, size, steps)
        assert sum(counts) == size
        assert min(counts) >= 1 and len(counts) <= steps
    assert reveal_counts(schedule, size, 1) == [size]


def test_the_counts_of_the_article_and_those_of_the_formula_that_it_prints():
    assert reveal_counts("cosine", 16, 4) == [6, 5, 3, 2]
    assert reveal_counts("linear", 16, 4) == [4, 4, 4, 4]
    assert reveal_counts("sqrt", 16, 4) == [2, 2, 3, 9]
    masked = [round(16 * math.cos(math.pi / 2 * step / 4)) for step in range(5)]
    assert [before - after for before, after in itertools.pairwise(masked)] == [1, 4, 5, 6]
