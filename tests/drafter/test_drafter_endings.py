"""How often draft blocks go on: counts, what is expected before any, and how soon they change."""

import numpy as np

from dllm.drafter.widths.endings import FIRST_GUESS, Endings

N = 4


def test_before_any_block_most_are_expected_to_go_on():
    np.testing.assert_allclose(Endings(N).goes_on, (1 - FIRST_GUESS) ** np.arange(1, N + 1))


def test_the_share_that_goes_on_past_each_place():
    endings, rng = Endings(N), np.random.default_rng(0)
    # Of the blocks a quarter ends at the first draft, and half of the others at the third.
    for _ in range(4000):
        ends = np.where(rng.random(8) < 0.25, 0, np.where(rng.random(8) < 0.5, 2, N))
        endings.observe(ends)
    # 24 blocks are remembered: the standard error of a share is about a tenth.
    np.testing.assert_allclose(endings.goes_on, [0.75, 0.75, 0.375, 0.375], atol=0.3)
    assert (np.diff(endings.goes_on) <= 0).all()


def test_places_behind_an_end_say_nothing():
    endings = Endings(N)
    before = endings.goes_on / np.concatenate(([1], endings.goes_on[:-1]))
    endings.observe(np.array([1, 1]))
    after = endings.goes_on / np.concatenate(([1], endings.goes_on[:-1]))
    assert after[0] > before[0] and after[1] < before[1]
    np.testing.assert_allclose(after[2:], before[2:])


def test_no_block_changes_nothing():
    endings = Endings(N)
    before = endings.goes_on
    endings.observe(np.zeros(0, dtype=int))
    np.testing.assert_allclose(endings.goes_on, before)


def test_forty_short_answers_after_long_ones_are_enough():
    endings = Endings(N)
    for before_end in [N] * 100 + [0] * 40:
        endings.observe(np.array([before_end]))
    assert endings.goes_on[0] < 0.25
