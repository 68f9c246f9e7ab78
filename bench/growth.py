"""How a cost grows: t = a + b x^p fitted to a few medians, with an interval for p.

A constant and a power, because a step of a small batch is mostly constant: the slope of log t
against log x would call everything sublinear. The fit minimises relative errors with a, b >= 0, for
every p of a grid; the interval is the middle 90% of the fits to resampled rounds (bootstrap).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESOLUTION = 0.04
EXPONENTS = [RESOLUTION * step for step in range(3, 76)]  # 0.12 .. 3
RESAMPLES = 100
DECIDED = 0.5  # the widest interval around 1 of which "linear" is said


@dataclass(frozen=True)
class Growth:
    """A fit: ``constant + factor * x ** exponent``, and the interval of the exponent."""

    constant: float
    factor: float
    exponent: float
    low: float
    high: float

    def at(self, x: float) -> float:
        """The fitted value."""
        return self.constant + self.factor * x**self.exponent

    @property
    def word(self) -> str:
        """How it grows."""
        return word(self.low, self.high) if self.factor else "constant"


def word(low: float, high: float) -> str:
    """How a cost grows whose exponent lies between; ``undecided`` where that says too little."""
    if low > 1:
        return "superlinear"
    if high < 1:
        return "sublinear"
    return "linear" if high - low <= DECIDED else "undecided"


def fit(xs: Sequence[float], rounds: Sequence[Sequence[float]], seed: int = 0) -> Growth:
    """The growth of the medians over rounds.

    Args:
        xs: at least three, rising.
        rounds: of each, a value for every x.
    """
    constant, factor, exponent = _fit(xs, _medians(rounds))
    generator = random.Random(seed)
    exponents = sorted(
        _fit(xs, _medians(generator.choices(rounds, k=len(rounds))))[2] for _ in range(RESAMPLES)
    )
    tail = RESAMPLES // 20
    low, high = exponents[tail] - RESOLUTION / 2, exponents[-1 - tail] + RESOLUTION / 2
    return Growth(constant, factor, exponent, low, high)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def _fit(xs: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Constant, factor and exponent of the smallest sum of squared relative errors."""
    best = (float("inf"), 0.0, 0.0, 0.0)
    for exponent in EXPONENTS:
        powers = [(x / xs[-1]) ** exponent for x in xs]
        constant, factor = _line(powers, values)
        error = sum(
            ((constant + factor * power) / value - 1) ** 2
            for power, value in zip(powers, values, strict=True)
        )
        if error < best[0]:
            best = (error, constant, factor / xs[-1] ** exponent, exponent)
    return best[1:]


def _line(us: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 that minimise the squared relative errors of a + b u."""
    weights = [1 / value**2 for value in values]
    total = sum(weights)
    mean_u = sum(w * u for w, u in zip(weights, us, strict=True)) / total
    mean_v = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    spread = sum(w * (u - mean_u) ** 2 for w, u in zip(weights, us, strict=True))
    both = sum(w * (u - mean_u) * (v - mean_v) for w, u, v in zip(weights, us, values, strict=True))
    slope = both / spread
    if slope <= 0:
        return mean_v, 0.0
    if mean_v - slope * mean_u >= 0:
        return mean_v - slope * mean_u, slope
    products = sum(w * u * v for w, u, v in zip(weights, us, values, strict=True))
    return 0.0, products / sum(w * u * u for w, u in zip(weights, us, strict=True))


def bends_at(xs: Sequence[float], rounds: Sequence[Sequence[float]]) -> float | None:
    """The first x from which one more costs more than before it, in every round."""
    for index in range(1, len(xs) - 1):
        is_steeper = [
            _slope(xs, values, index) > _slope(xs, values, index - 1) > 0 for values in rounds
        ]
        if all(is_steeper):
            return xs[index]
    return None


def _slope(xs: Sequence[float], values: Sequence[float], index: int) -> float:
    return (values[index + 1] - values[index]) / (xs[index + 1] - xs[index])
