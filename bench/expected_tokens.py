"""Tokens that a step of speculative decoding is expected to give, in closed form.

If each draft is kept with probability a, given that those before it were, a step that verifies K of
them gives the kept ones and one token of the target:

    1 + a + a^2 + ... + a^K = (1 - a^(K + 1)) / (1 - a)

``tests/bench/test_expected_tokens.py`` plays it out. A post on distributed speculation (the project's
seed 004) states this formula and prints a table of it; they disagree, so both are shown.
"""

from pathlib import Path

from bench.markdown import markdown

WIDTHS = (3, 5, 7, 10)
# By acceptance, at WIDTHS: as printed there.
PUBLISHED = {
    0.5: (1.88, 1.97, 1.99, 2.00),
    0.7: (2.76, 3.16, 3.29, 3.33),
    0.8: (3.36, 4.12, 4.50, 4.76),
    0.9: (3.81, 5.10, 6.10, 7.18),
    0.95: (3.95, 5.42, 6.78, 8.58),
}


def expected_tokens(acceptance: float, width: int) -> float:
    """Of a step that verifies ``width`` drafts, each kept with probability ``acceptance``."""
    return sum(acceptance**kept for kept in range(width + 1))


def expectation(_results: Path) -> str:
    """Section: the closed form, and what was published of it."""
    lines = []
    for acceptance, printed in PUBLISHED.items():
        pairs = zip(WIDTHS, printed, strict=True)
        cells = [f"{expected_tokens(acceptance, width):.2f} ({post:.2f})" for width, post in pairs]
        lines.append([f"{acceptance:g}", *cells])
    return markdown(["each draft kept", *(f"{width} drafts" for width in WIDTHS)], lines)
