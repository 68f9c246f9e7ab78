"""The policy ``adaptive``: widths with the most expected tokens per second, for the whole batch.

One more verified draft gains, on average, as many tokens as its probability to survive
verification (``survival``), and makes the step slower (``costs``). So the drafts of all rows are
sorted by survival, and the best number k of them has the most expected tokens per millisecond:

    max over k of  (rows + the k largest survivals) / cost(rows, k)      against  rows / plain cost

If plain decoding is faster, nothing is drafted. What is not done is not learned from, so now and
then a step is a trial that does the opposite: it drafts for a few requests, or for none. The number
of steps before a trial doubles from trial to trial. A trial that has waited for drafts of another
process is followed by so many steps that waiting stays a small share of the time.
"""

import time
from collections.abc import Callable

import numpy as np

from dllm.drafter.widths.costs import StepCosts
from dllm.drafter.widths.policy import VerifiedStep, WidthPolicy
from dllm.drafter.widths.survival import Survival, bins_of

FIRST_TRIAL, LAST_TRIAL = 8, 128  # steps before a trial: the fewest, the most
WAITING_SHARE = 0.01  # of the time that trials may wait for drafts
TIMED_ONE_IN = 4  # steps in a row without drafts; learning from each would cost them 1 %
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
    """Chooses each row's width from what was accepted so far and how long steps took.

    Args:
        reads_confidence: use the drafter's probability of each draft in the decision.
        hysteresis: drafting starts (stops) when its expected tokens per second exceed (fall below)
            those of plain decoding by this share.

    Attributes:
        is_drafting: whether steps draft that are not trials.
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
        self.costs = StepCosts(num_drafts)
        self.num_slots = num_slots
        # Confidence bins of each slot's last drafts (`survival`).
        self._bins = np.zeros((num_slots, num_drafts), dtype=np.int64)
        # Drafts that were looked up survive in another way than the drafter's.
        self.survival_of_lookups = Survival(num_slots, num_drafts, trusts_probability=True)
        self._looked_up = False  # the last drafts were
        self._has_drafts = np.zeros((0, num_drafts), dtype=bool)  # [rows, N]: something was found
        self._samples = np.zeros(0, dtype=bool)  # [rows] of the last step: VerifiedStep.samples
        self._num_verified: int | None = None  # in the last step; None if it cannot be timed
        self._has_news = False  # the last step changed something that a decision depends on
        self._is_trial = False
        self._wants = True  # what `wants_drafts` has said
        self._num_plain = 0  # steps in a row that neither drafted nor verified
        self.forget_drafter()
        self._waited_ms: float | None = None  # `note_wait` of the step that ends now
        self._decided_at: float | None = None  # when the last step was decided, by the clock

    def forget_drafter(self) -> None:
        """Draft as if the server had just started with this drafter; costs stay known."""
        self.survival = Survival(self.num_slots, self.num_drafts)
        self.is_drafting = True
        self._until_trial = self._trial_after = FIRST_TRIAL  # steps left; steps before the next one

    def observe(self, step: VerifiedStep) -> None:
        """Learn which of the last drafts survived, and which requests are new."""
        has_prompts = bool(step.in_prompt.any())
        # The costs are those of steps without prompts.
        self._num_verified = None if has_prompts else int(step.verified.sum())
        self._has_news |= (
            has_prompts
            or bool(self._num_verified)
            or len(step.slots) != len(self._samples)
            or not self._samples.all()
        )
        self._samples = step.samples
        if has_prompts:
            self.survival.reset(step.slots[step.in_prompt])
            self.survival_of_lookups.reset(step.slots[step.in_prompt])
        bins = self._bins[step.slots] if self.reads_confidence else None
        nothing = np.zeros_like(step.verified)
        others = (nothing, step.verified) if self._looked_up else (step.verified, nothing)
        for one, verified in zip((self.survival, self.survival_of_lookups), others, strict=True):
            one.observe(step.slots, verified, step.accepted, bins)

    def wants_lookup(self, slots: np.ndarray, confidence: np.ndarray) -> bool:
        """Whether looked-up drafts promise more tokens per second than anything else.

        A step that is to be a trial is left to ``wants_drafts``.
        """
        self._looked_up = False
        if not self._samples.any() or self._until_trial <= 1:
            return False
        if self._has_news:
            self._judge(slots)
        self._has_drafts = confidence > 0
        widths, rate = self._best_widths(slots, bins_of(confidence), looked_up=True)
        other = self._samples.sum() / self.costs.plain(len(slots))
        if self.is_drafting:
            other = max(other, self._best_widths(slots, bins=None)[1])
        self._looked_up = bool(widths.any() and rate > other)
        self._until_trial -= self._looked_up
        self._is_trial = False
        return self._looked_up

    def wants_drafts(self, slots: np.ndarray) -> bool:
        """Whether drafting is expected to be faster than plain decoding; a trial says the opposite.

        A step is timed from one decision to the next. If the drafter does not run, this is a
        decision; otherwise ``widths`` makes it, and the draft pass before it counts for the step.
        """
        assert len(slots) == len(self._samples), (len(slots), len(self._samples))
        if not self._samples.any():
            self._decided_at, self._wants = None, False
            return False  # only unfinished prompts: vLLM discards their drafts
        if self._has_news:
            self._judge(slots)
        self._until_trial -= 1
        self._is_trial = self._until_trial <= 0
        if self._is_trial:
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL)
            self._until_trial = self._trial_after
        self._wants = self.is_drafting != self._is_trial
        if not self._wants and self.may_skip:
            self._time_step(drafts=False)
        return self._wants

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        """The best widths; in a trial, full width for the requests that were verified least.

        All are 0 where ``wants_drafts`` has said no.

        The step since the last decision ends here, with its draft pass, unless the drafts were
        looked up.
        """
        self._time_step(drafts=not self._looked_up)
        if confidence is not None:
            self._bins[slots] = bins_of(confidence)
        if not (self._wants or self._looked_up):
            return np.zeros(len(slots), dtype=np.int64)
        if self._is_trial:
            exposure = np.where(self._samples, self.survival.exposure(slots), np.inf)
            num_tried = -(-int(self._samples.sum()) // ROWS_PER_TRIAL)
            widths = np.zeros(len(slots), dtype=np.int64)
            widths[exposure.argsort(kind="stable")[:num_tried]] = self.num_drafts
            return widths
        bins = None if confidence is None else self._bins[slots]
        widths, _ = self._best_widths(slots, bins, self._looked_up)
        return widths

    def worth_ms(self, slots: np.ndarray) -> float:
        """Milliseconds that drafts may be waited for; with a longer wait plain decoding is faster.

        Infinity before any step was timed. A trial waits as long as if all drafts were kept: what
        takes longer is of no use, however good it is.
        """
        num_rows = float(self._samples.sum())
        if self.costs.is_first or not num_rows:
            return float("inf")
        plain, verified = self.costs.plain(len(slots)), self.costs.drafting(len(slots))
        cost_ms = plain + verified - verified[0]  # the wait takes the place of the draft pass
        survival = np.ones((len(slots), self.num_drafts))
        if not self._is_trial:
            survival = self.survival.of(slots)
        survival = survival * self._samples[:, None]
        gained = np.concatenate(([0.0], -np.sort(-survival.ravel()))).cumsum()
        return float((plain * (1 + gained / num_rows) - cost_ms).max())

    def note_wait(self, seconds: float | None) -> None:
        """Take note that the step that ``widths`` decides next has waited so long for drafts.

        Without drafts it would have taken that much less time. So each such step also teaches the
        cost of a step without drafts, which is otherwise learned in trials alone.
        """
        if seconds is None:
            self._decided_at = None
            return
        self._waited_ms = 1e3 * seconds
        if self._is_trial:
            share = self._waited_ms / self.costs.plain(len(self._samples)) / WAITING_SHARE
            self._until_trial = max(self._until_trial, int(share))

    def _judge(self, slots: np.ndarray) -> None:
        """Decide again whether drafting is faster; if it begins now, soon try a step without."""
        self._has_news = False
        widths, drafting = self._best_widths(slots, bins=None)
        num_rows = len(slots)
        # Where the drafter runs in any case, plain steps cost a pass, too.
        cost = self.costs.plain(num_rows) if self.may_skip else self.costs.drafting(num_rows)[0]
        plain = self._samples.sum() / cost
        margin = 1 + self.hysteresis
        before = self.is_drafting
        if before:
            # If no draft is worth verifying, drafting costs its pass, gains no token and teaches
            # nothing: it stops whatever the two rates are.
            self.is_drafting = bool(widths.any() and drafting * margin >= plain)
        else:
            self.is_drafting = bool(drafting > plain * margin)
        if self.is_drafting != before:
            self._until_trial = FIRST_TRIAL if self.is_drafting else self._trial_after

    def _best_widths(
        self, slots: np.ndarray, bins: np.ndarray | None, looked_up: bool = False
    ) -> tuple[np.ndarray, float]:
        """``best_widths`` of this batch; rows that sampled nothing get 0."""
        gain = (self.survival_of_lookups if looked_up else self.survival).of(slots, bins)
        gain = gain * self._samples[:, None]
        if looked_up:
            gain = gain * self._has_drafts.cumprod(axis=1)
        costs = self.costs.drafting(len(slots), passes=not looked_up)
        return best_widths(gain, float(self._samples.sum()), costs)

    def _time_step(self, drafts: bool) -> None:
        now, before = self.clock(), self._decided_at
        waited_ms, self._waited_ms = self._waited_ms, None
        self._decided_at = now
        self._num_plain = 0 if drafts or self._num_verified else self._num_plain + 1
        if self._num_plain and self._num_plain % TIMED_ONE_IN != 1:
            return
        if before is not None and now > before and self._num_verified is not None:
            num_rows, ms = len(self._samples), 1e3 * (now - before)
            self.costs.observe(num_rows, self._num_verified, drafts, ms)
            if waited_ms is not None and waited_ms < ms:
                self.costs.observe(num_rows, self._num_verified, False, ms - waited_ms)
