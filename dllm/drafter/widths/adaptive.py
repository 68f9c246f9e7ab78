"""The policy ``adaptive``: widths with the most expected tokens per second, for the whole batch.

One more verified draft gains, on average, as many tokens as its probability to survive
verification (``survival``), and makes the step slower (``costs``). So the drafts of all rows are
sorted by survival, and the best number k of them has the most expected tokens per millisecond:

    max over k of  (rows + the k largest survivals) / cost(rows, k)      against  rows / plain cost

If plain decoding is faster, nothing is drafted. What is not done is not learned from, so now and
then a step is a trial that does the opposite: it drafts for a few requests, or for none. The number
of steps before a trial doubles from trial to trial, until the drafts of one were worth more than
plain steps: texts may have become easier. A trial that has waited for drafts of another
process is followed by so many steps that waiting stays a small share of the time.
"""

import time
from collections.abc import Callable

import numpy as np

from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import Survival, bins_of

FIRST_TRIAL, LAST_TRIAL = 8, 128  # steps before a trial: the fewest, the most
# Drafting starts (stops) when its expected tokens per second exceed (fall below) those of plain
# decoding by this share.
HYSTERESIS = 0.03
WAITING_SHARE = 0.01  # of the time that trials may wait for drafts
# Of steps in a row of the same kind (with drafts, or without) one in so many is timed, and followed
# by a new decision whether to draft: doing so after each would cost small models 2 % of their time.
TIMED_ONE_IN = 4
ROWS_PER_TRIAL = 8  # a trial that drafts verifies one request in so many, rounded up


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
    """Chooses each row's width from what was accepted so far and how long steps took."""

    reads_outcomes = True

    def __init__(
        self,
        num_drafts: int,
        num_slots: int,
        reads_confidence: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(num_drafts)
        self.reads_confidence = reads_confidence
        self.clock = clock
        self.costs = StepCosts(num_drafts)
        self.num_slots = num_slots
        # Confidence bins of each slot's last drafts (`survival`).
        self._bins = np.zeros((num_slots, num_drafts), dtype=np.int64)
        # Drafts that were looked up survive in another way than the drafter's.
        self.survival_of_lookups = Survival(num_slots, num_drafts, trusts_probability=True)
        self._looked_up = False  # the last drafts were
        self._lookup_widths = np.zeros(0, dtype=np.int64)  # [rows]: of these drafts
        self._num_rows = 0  # of the last step
        self._has_news = False  # what a decision depends on has changed since the last one
        self._is_due = False  # the last step may be followed by a decision
        self._is_trial = False
        self._wants = True  # what `wants_drafts` has said
        self._num_alike, self._was_plain = 0, False  # steps in a row of the same kind
        self.forget_drafter()
        self._waited_ms: float | None = None  # `note_wait` since the last step
        self._steps_of_wait = 0  # behind the last trial: in so many its wait is a small share
        self._observed_at: float | None = None  # when the last step was observed, by the clock

    def forget_requests(self, slots: np.ndarray) -> None:
        self.survival.reset(slots)
        self.survival_of_lookups.reset(slots)

    def forget_drafter(self) -> None:
        """Draft as if the server had just started with this drafter; costs stay known."""
        self.survival = Survival(self.num_slots, self.num_drafts)
        self.is_drafting = True  # in steps that are no trials
        self._until_trial = self._trial_after = FIRST_TRIAL  # steps left; steps before the next one

    def observe(self, step: VerifiedStep) -> None:
        has_prompts, num_rows = bool(step.in_prompt.any()), len(step.slots)
        is_timed = self._time_step(step, has_prompts)
        is_other = num_rows != self._num_rows
        self._has_news |= has_prompts or is_other or bool(step.verified.any())
        if not self.is_drafting and self._has_paid(step):
            self._trial_after = FIRST_TRIAL
            self._until_trial = max(FIRST_TRIAL, self._steps_of_wait)
        self._is_due = has_prompts or is_other or is_timed
        self._num_rows = num_rows
        if has_prompts:
            self.forget_requests(step.slots[step.in_prompt])
        bins = self._bins[step.slots] if self.reads_confidence else None
        nothing = np.zeros_like(step.verified)
        others = (nothing, step.verified) if self._looked_up else (step.verified, nothing)
        for one, verified in zip((self.survival, self.survival_of_lookups), others, strict=True):
            one.observe(step.slots, verified, step.accepted, bins)

    def wants_lookup(self, slots: np.ndarray, confidence: np.ndarray) -> bool:
        """Not in a trial, which is to show something else."""
        self._looked_up = False
        if self._is_trial:
            return False
        gain = self.survival_of_lookups.of(slots, bins_of(confidence))
        gain = gain * (confidence > 0).cumprod(axis=1)  # where something was found
        costs = self.costs.drafting(len(slots), passes=False)
        self._lookup_widths, rate = best_widths(gain, float(len(slots)), costs)
        other = len(slots) / self.costs.plain(len(slots))
        if self.is_drafting:
            other = max(other, self._best_widths(slots, bins=None)[1])
        self._looked_up = bool(self._lookup_widths.any() and rate > other)
        return self._looked_up

    def wants_drafts(self, slots: np.ndarray) -> bool:
        """While texts repeat themselves, what is looked up next is expected to be verified, too."""
        if not len(slots):
            self._wants = False
            return False
        self._judge(slots)
        self._until_trial -= 1
        self._is_trial = self._until_trial <= 0
        if self._is_trial:
            self._steps_of_wait = 0
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL)
            self._until_trial = self._trial_after
        self._wants = self.is_drafting and not self._looked_up
        if self._is_trial:
            self._wants = not self.is_drafting
        return self._wants

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        """In a trial, full width for the requests that were verified least."""
        if confidence is not None:
            self._bins[slots] = bins_of(confidence)
        if self._looked_up:
            return self._lookup_widths
        if not self._wants:
            return np.zeros(len(slots), dtype=np.int64)
        if self._is_trial:
            exposure = self.survival.exposure(slots)
            num_tried = -(-len(slots) // ROWS_PER_TRIAL)
            widths = np.zeros(len(slots), dtype=np.int64)
            widths[exposure.argsort(kind="stable")[:num_tried]] = self.num_drafts
            return widths
        bins = None if confidence is None else self._bins[slots]
        return self._best_widths(slots, bins)[0]

    def worth_ms(self, slots: np.ndarray) -> float:
        """With a longer wait plain decoding is faster. Infinity before any step was timed.

        A trial waits as long as if all drafts were kept: what takes longer is of no use.
        """
        if self.costs.is_first or not len(slots):
            return float("inf")
        plain, verified = self.costs.plain(len(slots)), self.costs.drafting(len(slots))
        cost_ms = plain + verified - verified[0]  # the wait takes the place of the draft pass
        survival = np.ones((len(slots), self.num_drafts))
        if not self._is_trial:
            survival = self.survival.of(slots)
        gained = np.concatenate(([0.0], -np.sort(-survival.ravel()))).cumsum()
        return float((plain * (1 + gained / len(slots)) - cost_ms).max())

    def note_wait(self, seconds: float | None) -> None:
        """Without drafts the next step takes that much less, which only trials teach otherwise."""
        if seconds is None:
            self._observed_at = None
            return
        self._waited_ms = 1e3 * seconds
        if self._is_trial:
            share = self._waited_ms / self.costs.plain(self._num_rows) / WAITING_SHARE
            self._steps_of_wait = int(share)
            self._until_trial = max(self._until_trial, self._steps_of_wait)

    def _judge(self, slots: np.ndarray) -> None:
        """If due, decide whether drafting is faster; if it begins, soon try a step without."""
        if not (self._has_news and self._is_due):
            return
        self._has_news = False
        widths, drafting = self._best_widths(slots, bins=None)
        num_rows = len(slots)
        plain = num_rows / self._undrafted_ms(num_rows)
        margin = 1 + HYSTERESIS
        before = self.is_drafting
        if before:
            # If no draft is worth verifying, drafting costs its pass, gains no token and teaches
            # nothing: it stops whatever the two rates are.
            self.is_drafting = bool(widths.any() and drafting * margin >= plain)
        else:
            self.is_drafting = bool(drafting > plain * margin)
        if self.is_drafting != before:
            self._until_trial = FIRST_TRIAL if self.is_drafting else self._trial_after

    def _has_paid(self, step: VerifiedStep) -> bool:
        """Whether drafts, for all rows as for those of a trial, would have been worth more."""
        tried, num_rows = step.verified > 0, len(step.slots)
        if self._looked_up or not tried.any():
            return False
        tokens = 1 + float(step.accepted[tried].mean())
        return tokens * self._undrafted_ms(num_rows) > float(self.costs.drafting(num_rows)[-1])

    def _undrafted_ms(self, num_rows: int) -> float:
        """Milliseconds of a step that verifies nothing; of a pass, too, where it always runs."""
        return self.costs.plain(num_rows) if self.may_skip else self.costs.drafting(num_rows)[0]

    def _best_widths(self, slots: np.ndarray, bins: np.ndarray | None) -> tuple[np.ndarray, float]:
        gain, costs = self.survival.of(slots, bins), self.costs.drafting(len(slots))
        return best_widths(gain, float(len(slots)), costs)

    def _time_step(self, step: VerifiedStep, has_prompts: bool) -> bool:
        """Unless it read prompts, learn from the time since the last step. True if it is timed."""
        now, before = self.clock(), self._observed_at
        waited_ms, self._waited_ms = self._waited_ms, None
        self._observed_at = now
        if has_prompts:
            return False
        num_rows, num_verified = len(step.slots), int(step.verified.sum())
        is_plain = not (step.drafted or num_verified)
        self._num_alike = self._num_alike + 1 if is_plain == self._was_plain else 1
        self._was_plain = is_plain
        if self._num_alike % TIMED_ONE_IN != 1:
            return False
        if before is not None and now > before:
            ms = 1e3 * (now - before)
            self.costs.observe(num_rows, num_verified, step.drafted, ms)
            if waited_ms is not None and waited_ms < ms:
                self.costs.observe(num_rows, num_verified, False, ms - waited_ms)
        return True


class LookupWidth(AdaptiveWidth):
    """``AdaptiveWidth`` of a server without a drafter: a step verifies lookups or is plain.

    Where a trial would draft, a step is plain: its time teaches what lookups have to beat.
    """

    def _judge(self, slots: np.ndarray) -> None:
        self.is_drafting = False

    def wants_drafts(self, slots: np.ndarray) -> bool:
        super().wants_drafts(slots)
        self._wants = False
        return False
