"""The policy ``adaptive``: widths with the most expected tokens per second, for the whole batch.

One more verified draft gains, on average, as many tokens as its probability to survive
verification, and makes the step as much slower as the cost table says. So the drafts of all rows
are sorted by survival, and the best number k of them has the most expected tokens per millisecond:

    max over k of  (rows + the k largest survivals) / cost(rows, k)      against  rows / plain cost

A draft that ends the answer, and all after it, gain nothing (``endings``). If plain decoding is
faster, nothing is drafted. Then nothing is learned either, so now and then a trial drafts for a few
requests. The number of steps before a trial doubles each time a trial changes nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dllm.drafter.widths.costs import CostTable, assumed_costs
from dllm.drafter.widths.endings import Endings
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import Survival, bins_of

FIRST_TRIAL, LAST_TRIAL = 8, 128  # steps without drafting before a trial: the fewest, the most
ROWS_PER_TRIAL = 8  # a trial verifies drafts of one request in so many, rounded up
EXTRA_KEPT = 0.9  # fading of the measured difference between a step's time and the table
MIN_SHARE_OF_TABLE = 0.1  # no step is expected to cost less than this share of the table's time
# Count of plain steps that marks a request as drafted for; so low that it never becomes positive.
DRAFTED_FOR = -(1 << 40)
# More than this many times the expected time between two decisions: the server was idle.
IDLE_STEPS = 4.0


def best_widths(survival: np.ndarray, base: float, cost_ms: np.ndarray) -> tuple[np.ndarray, float]:
    """The widths ``[rows]`` with the most expected tokens per millisecond, and that rate.

    Args:
        survival: ``[rows, N]``, not increasing along a row.
        base: tokens expected without any draft.
        cost_ms: ``[rows * N + 1]``, of a step that verifies 0, 1, 2, ... drafts in total.
    """
    flat = survival.ravel()
    # Stable: of equal survivals earlier places come first, so the best k are a prefix of each row.
    order = np.argsort(-flat, kind="stable")
    expected = base + np.concatenate(([0.0], flat[order].cumsum()))
    rates = expected / cost_ms
    best = int(rates.argmax())
    rows, num_drafts = survival.shape
    widths = np.bincount(order[:best] // num_drafts, minlength=rows)
    return widths, float(rates[best])


class AdaptiveWidth(WidthPolicy):
    """Chooses each row's width from what was accepted so far and what steps cost.

    Args:
        num_slots: requests that the server runs at once.
        reads_confidence: use the drafter's probability of each draft in the decision.
        hysteresis: drafting starts (stops) when its expected tokens per second exceed (fall below)
            those of plain decoding by this share.
        clock: seconds.

    Attributes:
        costs: a guess until the worker has measured them.
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
        # Confidence bins of each slot's last drafts (`survival`).
        self._bins = np.zeros((num_slots, num_drafts), dtype=np.int64)
        self._samples = np.zeros(0, dtype=bool)  # [rows] of the last step: VerifiedStep.samples
        # Steps after its prompt of a request that was never drafted for; else DRAFTED_FOR.
        self._num_plain = np.zeros(num_slots, dtype=np.int64)
        self._is_trial = False
        self._has_news = False  # the last step changed something that a decision depends on
        self._until_trial = self._trial_after = FIRST_TRIAL  # steps left; steps before the next one
        # How much longer steps take than the table says, and how many were timed: [without, with]
        # drafting. The scheduler's share of a step is part of it.
        self._extra_ms, self._num_timed = [0.0, 0.0], [0, 0]
        self._decided: _Decision | None = None

    def observe(self, step: VerifiedStep) -> None:
        """Learn which of the last drafts were kept, and which requests are new."""
        has_prompts = bool(step.in_prompt.any())
        if has_prompts:
            self._observe_undrafted_answers(step.slots[step.in_prompt])
            self._decided = None  # a step with prompts is not timed: the table does not have it
        self._num_plain[step.slots[~step.in_prompt]] += 1
        self._has_news = (
            has_prompts
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
            return 0  # only unfinished prompts: vLLM discards their drafts
        if not self.is_drafting and not self._has_news:
            self._count_down()  # the same batch as when plain decoding was found to be faster
            return self.num_drafts if self._is_trial else self._decide_plain(len(slots))
        # Expected tokens per millisecond, with drafting and without.
        widths, drafting = self._best_widths(slots, self.survival.of(slots) * self.endings.goes_on)
        table_ms = self.costs.plain(len(slots))
        plain = self._samples.sum() / max(
            table_ms + self._extra_ms[False], MIN_SHARE_OF_TABLE * table_ms
        )
        margin = 1 + self.hysteresis
        if self.is_drafting:
            # If no draft is worth verifying, drafting costs its pass, gains no token and teaches
            # nothing: it stops whatever the two rates are.
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
        return self._decide_plain(len(slots))

    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """The best widths; in a trial, full width for the requests that were verified least."""
        self.endings.observe(before_end[self._samples])
        self._num_plain[slots] = DRAFTED_FOR
        if confidence is not None:
            self._bins[slots] = bins_of(confidence)
        if self._is_trial:
            exposure = np.where(self._samples, self.survival.exposure(slots), np.inf)
            widths = np.zeros(len(slots), dtype=np.int64)
            num_tried = -(-int(self._samples.sum()) // ROWS_PER_TRIAL)
            chosen = exposure.argsort(kind="stable")[:num_tried]
            widths[chosen] = before_end[chosen]
        else:
            is_before_end = np.arange(self.num_drafts) < before_end[:, None]  # [rows, N]
            bins = None if confidence is None else self._bins[slots]
            widths, _ = self._best_widths(slots, self.survival.of(slots, bins) * is_before_end)
        self._note_decision(len(slots), True, int(widths.sum()))
        return widths

    def _observe_undrafted_answers(self, slots: np.ndarray) -> None:
        """Learn the answer lengths of requests that ended without drafting.

        Args:
            slots: slots that new requests have taken; what is stored is about those before them.
        """
        lengths = self._num_plain[slots]
        self.endings.observe(np.minimum(lengths[lengths > 0] - 1, self.num_drafts))
        self._num_plain[slots] = 0

    def _decide_plain(self, num_rows: int) -> int:
        """Note the decision not to draft; returns the limit, 0."""
        self._note_decision(num_rows, False, 0)
        return 0

    def _best_widths(self, slots: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, float]:
        """``best_widths`` of this batch.

        Args:
            gain: ``[rows, N]``, tokens expected from verifying each draft.
        """
        gain = gain * self._samples[:, None]
        table_ms = self.costs.drafting(len(slots))
        cost_ms = np.maximum(table_ms + self._extra_ms[True], MIN_SHARE_OF_TABLE * table_ms)
        return best_widths(gain, float(self._samples.sum()), cost_ms)

    def _count_down(self) -> None:
        """One more step without drafting; makes it a trial when enough have passed."""
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._is_trial = True
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL)
            self._until_trial = self._trial_after

    def _note_decision(self, num_rows: int, drafts: bool, num_verified: int) -> None:
        """Note a decision, and compare the time since the last one with the table.

        That time is one step: the target verified what was decided then, and the drafter has just
        run if ``drafts``. So each trial also measures what a draft pass really costs.

        Args:
            num_verified: drafts that the next step verifies, over all rows.
        """
        last = self._decided
        self._decided = now = _Decision(self.clock(), num_rows, num_verified)
        if last is None or last.num_rows != num_rows or (last.num_verified and not drafts):
            return
        table = self.costs.drafting(num_rows)[last.num_verified] if drafts else None
        expected = self.costs.plain(num_rows) if table is None else float(table)
        passed_ms, extra_ms = 1e3 * (now.at - last.at), self._extra_ms[drafts]
        if 0 < passed_ms < IDLE_STEPS * (expected + max(extra_ms, 0.0)):
            self._num_timed[drafts] += 1
            # The plain mean of the first few steps, then an exponentially fading one.
            share = max(1 - EXTRA_KEPT, 1 / self._num_timed[drafts])
            self._extra_ms[drafts] += share * (passed_ms - expected - extra_ms)


@dataclass(frozen=True)
class _Decision:
    """A decision about the next step."""

    at: float  # seconds, by the policy's clock
    num_rows: int
    num_verified: int  # drafts that the next step verifies, over all rows
