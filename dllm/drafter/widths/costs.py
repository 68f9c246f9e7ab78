"""How long steps take, learned from the steps of the server itself.

The time of a step is taken as linear in what the step does:

    ms = each step + per request + per verified draft + (draft pass + draft pass per request)

The five numbers are estimated by a Kalman filter: a linear regression whose estimates may drift.
Two drifts are assumed. A machine becomes slower or faster as a whole, so that all five change in
proportion; this is usual and quick. And their proportions change, which is rare and slow.
"""

import numpy as np

# The first guesses, before anything is timed, in units of the step's fixed part. Only their
# proportions matter.
EACH_STEP, PER_REQUEST, PER_BLOCK, DRAFT_PASS, DRAFT_PER_REQUEST = 1.0, 0.1, 0.3, 0.3, 0.03
# Standard deviations, as shares of a step's time or of a number.
NOISE = 0.2  # of a measured time
FIRST_DOUBT = 0.7  # of each number before anything is measured
SPEED_DRIFT, SHAPE_DRIFT = 0.01, 0.01  # from one step to the next
# A time that differs by more standard deviations counts as one that differs by so many: the server
# was idle, or something else had the processor.
MOST_SURPRISING = 2.5
LEAST = 0.02  # a number is at least this share of its first guess, scaled to the machine's speed


class StepCosts:
    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._guess = np.array(
            [EACH_STEP, PER_REQUEST, PER_BLOCK / num_drafts, DRAFT_PASS, DRAFT_PER_REQUEST]
        )
        # The numbers, as multiples of the guess, and the covariance of the estimate. The first time
        # that is measured says what a unit is in milliseconds.
        self._numbers = np.ones(len(self._guess))
        self._one = np.eye(len(self._guess))
        self._doubt = FIRST_DOUBT**2 * self._one
        self.is_first = True

    def observe(self, num_rows: int, num_verified: int, drafts: bool, ms: float) -> None:
        """``num_verified``: summed over the rows. ``drafts``: as ``VerifiedStep.drafted``."""
        work = self._guess * np.array([1, num_rows, num_verified, drafts, drafts * num_rows])
        if self.is_first:
            self.is_first = False
            scale = ms / float(work.sum())
            self._numbers *= scale
            self._doubt *= scale**2
        expected = float(self._numbers @ work)
        gain = self._doubt @ work
        variance = float(gain @ work) + (NOISE * expected) ** 2
        most = MOST_SURPRISING * variance**0.5
        surprise = min(max(ms - expected, -most), most)
        self._numbers = self._numbers + gain * (surprise / variance)
        speed = float(self._numbers.sum()) / len(self._numbers)
        self._numbers = np.maximum(self._numbers, LEAST * speed)
        drift = SPEED_DRIFT * self._numbers
        self._doubt = (
            self._doubt
            - gain[:, None] * (gain / variance)
            + drift[:, None] * drift
            + (SHAPE_DRIFT * speed) ** 2 * self._one
        )

    def plain(self, num_rows: int) -> float:
        """Milliseconds of a step that neither verifies nor drafts."""
        each, per_row, *_ = self._numbers * self._guess
        return float(each + per_row * num_rows)

    def drafting(self, num_rows: int, passes: bool = True) -> np.ndarray:
        """``[num_rows * N + 1]`` milliseconds; entry k is for k verified drafts, over all rows."""
        _, _, per_draft, draft_pass, draft_per_row = self._numbers * self._guess
        without = self.plain(num_rows) + passes * (draft_pass + draft_per_row * num_rows)
        costs: np.ndarray = without + per_draft * np.arange(num_rows * self.num_drafts + 1)
        return costs
