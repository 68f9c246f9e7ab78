"""Schedules reveal every mask once, in the order that their names promise."""

import itertools
import math
from collections.abc import Callable

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


def rounded(masked: Callable[[float], float], size: int, num_steps: int) -> list[int]:
    """The article's way: what is left is rounded behind each step; a step of 0 is skipped."""
    left = [round(size * masked(step / num_steps)) for step in range(num_steps + 1)]
    return [before - after for before, after in itertools.pairwise(left) if before > after]


@pytest.mark.parametrize(
    ("size", "num_steps", "counts"),
    [
        (16, 4, [6, 5, 4, 1]),
        (15, 8, [3, 3, 2, 3, 1, 2, 1]),
        (32, 16, [3, 3, 3, 3, 3, 3, 2, 3, 2, 2, 1, 2, 1, 1]),
    ],
)
def test_cosine_reveals_many_at_first_and_few_at_the_end(size, num_steps, counts):
    assert rounded(lambda t: 1 - math.sin(math.pi / 2 * t), size, num_steps) == counts
    assert reveal_counts("cosine", size, num_steps) == counts


def test_the_counts_of_16_masks_that_the_pages_print():
    assert reveal_counts("linear", 16, 4) == [4, 4, 4, 4]
    assert reveal_counts("sqrt", 16, 4) == [2, 3, 3, 8]
    assert rounded(lambda t: math.cos(math.pi / 2 * t), 16, 4) == [1, 4, 5, 6]
