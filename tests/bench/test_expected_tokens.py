"""The closed form of speculative decoding, against playing it out."""

from pathlib import Path

import numpy as np
import pytest

from bench.expected_tokens import PUBLISHED, WIDTHS, expectation, expected_tokens


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("width", [0, 1, 7, 15])
def test_closed_form_is_the_mean_of_many_steps(acceptance, width):
    rng, count = np.random.default_rng(width), 100_000
    kept = (rng.random((count, width)) < acceptance).cumprod(axis=1).sum(axis=1)
    error = max(kept.std() / count**0.5, 1e-12)
    assert abs(1 + kept.mean() - expected_tokens(acceptance, width)) <= 4.5 * error


def test_only_the_first_row_of_the_published_table_follows_from_its_formula():
    agrees = {
        acceptance: all(
            abs(expected_tokens(acceptance, width) - printed) < 0.01
            for width, printed in zip(WIDTHS, row, strict=True)
        )
        for acceptance, row in PUBLISHED.items()
    }
    assert [acceptance for acceptance, same in agrees.items() if same] == [0.5]
    assert "| 0.9 | 3.44 (3.81) |" in expectation(Path())
