"""How far the probabilities of decisions can be trusted, and a temperature for each type.

accuracy      questions whose most probable option is the right one
Brier         squared distance of the probabilities from the right answer, 0 to 2
ECE           how far confidence is from accuracy, over ten bins of equal width
hesitation    AUROC: how often a wrong answer hesitates more than a right one; 0.5 is chance
label mass    probability of all labels among all tokens
agreement     questions that two runs answer alike
odds          mean distance from the true probability, where the question has one
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

NUM_BINS = 10
NUM_FOLDS = 5
TEMPERATURES = np.geomspace(0.1, 10, 201)
TINY = 1e-12  # below it a probability has no logarithm of use


@dataclass(frozen=True)
class Decided:
    type: str  # ``predicate``, ``choice`` or ``score``
    probs: Sequence[float]  # of its options (of a predicate: yes, no)
    right: int | None  # index of the right one; None if only ``odds`` are known
    label_mass: float
    hesitation: float
    odds: float | None = None  # the true probability of yes
    again: Sequence[float] = ()  # the probabilities of a second run

    @property
    def said(self) -> int:
        return int(np.argmax(self.probs))


def tempered(probs: Sequence[float], temperature: float) -> np.ndarray:
    logs = np.log(np.maximum(probs, TINY)) / temperature
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def log_losses(decided: Sequence[Decided], temperatures: Iterable[float]) -> np.ndarray:
    """For each temperature the mean of -ln of the right option's probability, in nats."""
    logs = np.full((len(decided), max(len(one.probs) for one in decided)), -np.inf)
    for row, one in zip(logs, decided, strict=True):
        row[: len(one.probs)] = np.log(np.maximum(one.probs, TINY))
    logs -= logs.max(axis=1, keepdims=True)
    right = [one.right or 0 for one in decided]
    found = []
    for temperature in temperatures:
        weights = np.exp(logs / temperature)
        of_right = weights[np.arange(len(decided)), right] / weights.sum(axis=1)
        found.append(-np.log(np.maximum(of_right, TINY)).mean())
    return np.array(found)


def brier(decided: Sequence[Decided]) -> float:
    """Mean squared distance from the right answer (Brier 1950, over all options)."""
    wanted = [np.arange(len(one.probs)) == one.right for one in decided]
    pairs = zip(decided, wanted, strict=True)
    return float(np.mean([np.square(np.subtract(one.probs, want)).sum() for one, want in pairs]))


def calibration_error(decided: Sequence[Decided], temperature: float = 1.0) -> float:
    """Expected calibration error of the most probable option (Guo et al. 2017)."""
    top = np.array([tempered(one.probs, temperature).max() for one in decided])
    is_right = np.array([one.said == one.right for one in decided])
    place = np.minimum((top * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = (abs((top - is_right)[place == index].sum()) for index in range(NUM_BINS))
    return float(sum(gaps) / len(decided))


def auroc(decided: Sequence[Decided]) -> float | None:
    """How often a wrong answer hesitates more than a right one; None if all are one of these."""
    wrong = np.array([one.hesitation for one in decided if one.said != one.right])
    right = np.array([one.hesitation for one in decided if one.said == one.right])
    if not len(wrong) or not len(right):
        return None
    above, below = wrong[:, None] > right, wrong[:, None] < right
    return float(0.5 + 0.5 * (above.mean() - below.mean()))


def fit(decided: Sequence[Decided]) -> float:
    return float(TEMPERATURES[int(np.argmin(log_losses(decided, TEMPERATURES)))])


def cross_validated(decided: Sequence[Decided]) -> dict[str, float] | None:
    """``temperature`` (fitted on all), and ``log_loss`` and ``ece`` before and after.

    These are means over five parts, each scored with the temperature of the other four. None for
    fewer than five questions.
    """
    if len(decided) < NUM_FOLDS:
        return None
    before, after = np.zeros(2), np.zeros(2)
    for fold in range(NUM_FOLDS):
        part = decided[fold::NUM_FOLDS]
        rest = [one for place, one in enumerate(decided) if place % NUM_FOLDS != fold]
        share = len(part) / len(decided)
        temperature = fit(rest)
        losses = log_losses(part, [1.0, temperature])
        before += share * np.array([losses[0], calibration_error(part)])
        after += share * np.array([losses[1], calibration_error(part, temperature)])
    return {
        "temperature": round(fit(decided), 3),
        "log_loss": float(before[0]),
        "log_loss_after": float(after[0]),
        "ece": float(before[1]),
        "ece_after": float(after[1]),
    }


def report(decided: Sequence[Decided]) -> dict[str, float | int | None]:
    """All scores of some questions; None where they say nothing."""
    sure = [one for one in decided if one.right is not None]
    by_odds = [abs(one.probs[0] - one.odds) for one in decided if one.odds is not None]
    pairs = [(one.said, int(np.argmax(one.again))) for one in decided if len(one.again)]
    return {
        "questions": len(decided),
        "accuracy": float(np.mean([one.said == one.right for one in sure])) if sure else None,
        "brier": brier(sure) if sure else None,
        "ece": calibration_error(sure) if sure else None,
        "hesitation_auroc": auroc(sure),
        "label_mass": float(np.mean([one.label_mass for one in decided])),
        "agreement": float(np.mean([a == b for a, b in pairs])) if pairs else None,
        "odds": float(np.mean(by_odds)) if by_odds else None,
    }


def table(reports: dict[str, dict[str, float | int | None]], title: str) -> Table:
    shown = Table(title=title, box=SIMPLE_HEAD, padding=0)  # 80 columns hold it
    shown.add_column("")
    for name in next(iter(reports.values())):
        shown.add_column(name.replace("_", " "), justify="right")
    for name, scores in reports.items():
        cells = (
            "-" if one is None else str(one) if isinstance(one, int) else f"{one:.3f}"
            for one in scores.values()
        )
        shown.add_row(name, *cells)
    return shown
