"""The interface of width policies, which decide how many drafts of a request the target verifies.

The drafter drafts N tokens for every request in one pass. What a policy can make smaller is
verification: for each request and step it answers with a width from 0 (verify nothing, an ordinary
decode step) to N.

The output is that of the target for any answer: drafts that are not verified are not used.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class VerifiedStep:
    """What one step of the target did, row by row.

    Attributes:
        slots: ``[rows]`` the request slot of each row; a slot is reused when its request
            ends or is preempted.
        in_prompt: ``[rows]`` bool: the row computed prompt tokens. What a policy stored about this
            slot is then about an earlier request.
        verified: ``[rows]`` number of drafts that the target verified.
        accepted: ``[rows]`` how many of them it kept and gained from. A draft that ends the answer
            counts as rejected, and so do those behind it: the target's own next token, which every
            step samples, would have ended the answer in the same step.
        drafted: the drafter ran between the step before and this one. So a pass of it is part of
            the time between the two.
    """

    slots: np.ndarray
    in_prompt: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    drafted: bool


class WidthPolicy(ABC):
    """Chooses the width of every request that can use drafts, step by step.

    Those whose prompt is not read to its end cannot, and are not among the ``slots`` of a question.
    A scheduler asks (``driver``). When a step is scheduled: ``wants_drafts``. When its outcome is
    known: ``observe`` (if ``reads_outcomes``). When its drafts are there: ``wants_lookup`` (if some
    are from the requests' own texts), and ``widths``. Where steps are scheduled ahead, ``widths``
    are asked for with the schedule, and what is observed is a step older.

    Where drafts come from another process, ``wants_drafts`` is asked when the outcome is known,
    ``worth_ms`` says how long to wait for them, and ``note_wait`` is told how long that was.
    """

    reads_outcomes: ClassVar[bool] = False
    reads_confidence: bool = False  # ``widths`` is given the drafter's probabilities
    may_skip: bool = True  # the drafter does not run where ``wants_drafts`` says no

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self.most = num_drafts  # most: the largest width

    def observe(self, step: VerifiedStep) -> None:  # noqa: B027  most policies learn nothing
        """Learn from a step of the target."""

    def forget_requests(self, slots: np.ndarray) -> None:  # noqa: B027
        """Other requests have these slots from now on."""

    def forget_drafter(self) -> None:  # noqa: B027
        """The drafter has other weights: what was learned of its drafts is of no use."""

    def wants_drafts(self, slots: np.ndarray) -> bool:
        """Whether to draft for this batch; if not, all its widths are 0."""
        return True

    def wants_lookup(self, slots: np.ndarray, confidence: np.ndarray) -> bool:
        """Whether drafts that were looked up take the place of a pass of the drafter.

        ``confidence``: ``[rows, N]``, of these drafts (``drafter.prompt_lookup``).
        """
        return False

    @abstractmethod
    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        """``[rows]`` int, 0 to N: drafts of each row that the next step verifies.

        The drafts themselves are not among the arguments: a width may depend on the drafter's
        distributions, never on what was drawn from them.

        ``confidence``: ``[rows, N]`` fp32, the drafter's probability of the likeliest token at each
        place; 0 where this token ends the answer, because verifying it gains nothing. None unless
        ``reads_confidence``.
        """

    def worth_ms(self, slots: np.ndarray) -> float:
        """Milliseconds that drafts may be waited for; infinity where nothing speaks against it."""
        return float("inf")

    def note_wait(self, seconds: float | None) -> None:  # noqa: B027
        """So long was waited for drafts behind the last step; None if there are no drafts.

        Then ``widths`` is not called, and nothing is learned from the time until ``observe``.
        """


class FixedWidth(WidthPolicy):
    """The same width for every request, N if not given; 0 turns drafting off."""

    def __init__(self, num_drafts: int, width: int | None = None) -> None:
        super().__init__(num_drafts)
        self.width = self.most = num_drafts if width is None else width

    def wants_drafts(self, slots: np.ndarray) -> bool:
        return self.width > 0

    def widths(self, slots: np.ndarray, confidence: np.ndarray | None) -> np.ndarray:
        return np.full(len(slots), self.width)
