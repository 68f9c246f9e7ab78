"""Widths that earn the most tokens per second: survival times measured cost, over the whole batch.

Verifying one more draft is worth its survival in tokens and costs what the table says a step with
one token more costs. So the drafts of all rows are sorted by survival, and the best number of them
is the one with the most expected tokens per millisecond:

    max over k of  (rows + the k largest survivals) / cost(rows, k)      against  rows / plain cost

The draft that ends an answer, and all behind it, are worth nothing (``endings``).
If plain decoding wins, nothing is drafted. Then nothing is learned either, so from time to time a
few requests are tried: after a number of steps that doubles with every trial that changes nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dllm.drafter.widths.costs import CostTable, assumed_costs
from dllm.drafter.widths.endings import Endings
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import Survival, bins_of

FIRST_TRIAL, LAST_TRIAL = 8, 128  # steps without drafting before a trial
ROWS_PER_TRIED = 8  # of so many requests one is tried
UNSEEN_KEPT = 0.9  # fading of what a step costs beside the table's
LEAST_OF_TABLE = 0.1  # no step is expected to cost less than this part of the table's
NOT_PLAIN = -(1 << 40)
# A pause longer than this many steps is idleness, not a step.
IDLE_STEPS = 4.0


def best_widths(survival: np.ndarray, base: float, cost_ms: np.ndarray) -> tuple[np.ndarray, float]:
    """The widths with the most expected tokens per millisecond, and how many those are.

    Args:
        survival: ``[rows, N]``, not increasing along a row.
        base: tokens expected with no draft at all.
        cost_ms: ``[rows * N + 1]``, of a step that verifies 0, 1, 2, ... drafts in all.
    """
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")  # ties in order, so that each row's are a prefix
    expected = base + np.concatenate(([0.0], flat[order].cumsum()))
    rates = expected / cost_ms
    best = int(rates.argmax())
    rows, num_drafts = survival.shape
    widths = np.bincount(order[:best] // num_drafts, minlength=rows)
    return widths, float(rates[best])


class AdaptiveWidth(WidthPolicy):
    """Width per row and step from what has been accepted so far and what steps cost.

    Args:
        num_slots: requests that the server runs at once.
        reads_confidence: sharpen each decision by how sure the drafter is of each token.
        hysteresis: drafting starts (stops) when it is this much better (worse) than plain decoding.
        clock: seconds.

    Attributes:
        costs: assumed until the worker has measured them.
    """

    reads_outcomes = True

    def __init__(
        self,
        num_drafts: int,
        num_slots: int,
        reads_confidence: bool = True,
        hysteresis: float = 0.03,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(num_drafts)
        self.reads_confidence = reads_confidence
        self.hysteresis = hysteresis
        self.clock = clock
        self.costs: CostTable = assumed_costs(num_drafts)
        self.survival = Survival(num_slots, num_drafts)
        self.endings = Endings(num_drafts)
        self.is_drafting = True
        self._bins = np.zeros((num_slots, num_drafts), dtype=np.int64)  # of the last drafts
        self._samples = np.zeros(0, dtype=bool)  # of the last step's rows
        # Steps behind its prompt of a request that nobody has drafted for yet.
        self._num_plain = np.zeros(num_slots, dtype=np.int64)
        self._is_trial = self._has_news = False
        self._until_trial = self._trial_after = FIRST_TRIAL
        # What a step without and with drafting costs more than the table says, or less.
        self._unseen_ms, self._num_seen = [0.0, 0.0], [0, 0]
        self._decided: _Decision | None = None

    def observe(self, step: VerifiedStep) -> None:
        """Learn what became of the last drafts, and what a step costs beside the table's."""
        reads_prompts = bool(step.in_prompt.any())
        if reads_prompts:
            self._end_answers(step.slots[step.in_prompt])
            self._decided = None  # a step of another kind
        self._num_plain[step.slots[~step.in_prompt]] += 1
        self._has_news = (
            reads_prompts
            or bool(step.verified.any())
            or len(step.slots) != len(self._samples)
            or not self._samples.all()
        )
        if not self._has_news:
            return
        self._samples = step.samples
        self.survival.reset(step.slots[step.in_prompt])
        bins = self._bins[step.slots] if self.reads_confidence else None
        self.survival.observe(step.slots, step.verified, step.accepted, bins)

    def limit(self, slots: np.ndarray) -> int:
        """0 while plain decoding is expected to be faster, except for trials."""
        assert len(slots) == len(self._samples), (len(slots), len(self._samples))
        self._is_trial = False
        if not self._samples.any():
            return 0  # nothing but parts of prompts: the drafts would be thrown away
        if not self.is_drafting and not self._has_news:
            self._count_down()  # nothing has changed since drafting was found not to pay
            return self.num_drafts if self._is_trial else self._plain(len(slots))
        widths, drafting = self._best(slots, self.survival.of(slots) * self.endings.goes_on)
        table_ms = self.costs.plain(len(slots))
        plain = self._samples.sum() / max(
            table_ms + self._unseen_ms[False], LEAST_OF_TABLE * table_ms
        )
        margin = 1 + self.hysteresis
        if self.is_drafting:
            # Drafting of which nothing is verified is plain decoding, and learns as little.
            self.is_drafting = bool(widths.any() and drafting * margin >= plain)
            if self.is_drafting:
                self._trial_after = max(FIRST_TRIAL, self._trial_after // 2)
            self._until_trial = self._trial_after
        elif drafting > plain * margin:
            self.is_drafting = True
        else:
            self._count_down()
        if self.is_drafting or self._is_trial:
            return self.num_drafts
        return self._plain(len(slots))

    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """The best ones; of a trial, everything of the requests that have been tried least."""
        self.endings.observe(before_end[self._samples])
        self._num_plain[slots] = NOT_PLAIN
        if confidence is not None:
            self._bins[slots] = bins_of(confidence)
        if self._is_trial:
            tried = np.where(self._samples, self.survival.exposure(slots), np.inf)
            widths = np.zeros(len(slots), dtype=np.int64)
            num_tried = -(-int(self._samples.sum()) // ROWS_PER_TRIED)
            chosen = tried.argsort(kind="stable")[:num_tried]
            widths[chosen] = before_end[chosen]
        else:
            goes_on = np.arange(self.num_drafts) < before_end[:, None]
            bins = None if confidence is None else self._bins[slots]
            widths, _ = self._best(slots, self.survival.of(slots, bins) * goes_on)
        self._decide(len(slots), True, int(widths.sum()))
        return widths

    def _end_answers(self, slots: np.ndarray) -> None:
        """Other requests have taken these slots: how long were answers that nobody drafted for?"""
        lengths = self._num_plain[slots]
        self.endings.observe(np.minimum(lengths[lengths > 0] - 1, self.num_drafts))
        self._num_plain[slots] = 0

    def _plain(self, num_rows: int) -> int:
        self._decide(num_rows, False, 0)
        return 0

    def _best(self, slots: np.ndarray, worth: np.ndarray) -> tuple[np.ndarray, float]:
        worth = worth * self._samples[:, None]
        table_ms = self.costs.drafting(len(slots))
        cost_ms = np.maximum(table_ms + self._unseen_ms[True], LEAST_OF_TABLE * table_ms)
        return best_widths(worth, float(self._samples.sum()), cost_ms)

    def _count_down(self) -> None:
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._is_trial = True
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL)
            self._until_trial = self._trial_after

    def _decide(self, num_rows: int, drafts: bool, num_verified: int) -> None:
        """Note a decision; what passed since the last one was a step. What of it was not expected?

        In it the target verified what was decided then, and the drafter drafted if it has now. So
        every trial says what a draft pass costs, also where the table has it wrong.
        """
        last = self._decided
        self._decided = now = _Decision(self.clock(), num_rows, num_verified)
        if last is None or last.num_rows != num_rows or (last.num_verified and not drafts):
            return
        table = self.costs.drafting(num_rows)[last.num_verified] if drafts else None
        expected = self.costs.plain(num_rows) if table is None else float(table)
        passed, known = 1e3 * (now.at - last.at), self._unseen_ms[drafts]
        if 0 < passed < IDLE_STEPS * (expected + max(known, 0.0)):
            self._num_seen[drafts] += 1
            share = max(1 - UNSEEN_KEPT, 1 / self._num_seen[drafts])
            self._unseen_ms[drafts] += share * (passed - expected - known)


@dataclass(frozen=True)
class _Decision:
    """When it was taken, of how many requests, and how many drafts the next step verifies."""

    at: float
    num_rows: int
    num_verified: int
