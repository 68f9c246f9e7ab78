"""Who decides how many drafts of a request the target verifies: one interface for every policy.

The drafter always drafts N tokens (its one pass costs what it costs); what shrinks is verification.
A policy answers per request and per step with a width from 0 (verify nothing: an ordinary decode
step) to N. Whatever it answers, the output stays that of the target: a draft that is not verified
is merely not used.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


@dataclass(frozen=True)
class VerifiedStep:
    """What one step of the target did, row by row.

    Attributes:
        slots: ``[rows]`` the request slot of each row; a slot is reused when its request ends.
        in_prompt: ``[rows]`` bool: the row computed prompt tokens. What a policy knows of its slot
            is then about an earlier request.
        samples: ``[rows]`` bool: the row emitted tokens (the last prompt chunk does).
        verified, accepted: ``[rows]`` drafts that the target looked at, and those it kept.
        prompt_logits: ``[rows that are in_prompt and samples, vocab]``, the target's after the last
            prompt token; None unless ``WidthPolicy.reads_prompt``.
    """

    slots: np.ndarray
    in_prompt: np.ndarray
    samples: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    prompt_logits: torch.Tensor | None = None


class WidthPolicy(ABC):
    """Widths of every row, step by step.

    The speculator calls ``observe`` (if ``reads_outcomes``), then ``limit``, then - unless the
    limit is 0, when nothing is drafted - drafts and calls ``widths``.

    Attributes:
        reads_outcomes: ``observe`` is called; it costs one wait for the device per step.
        reads_prompt: ``VerifiedStep.prompt_logits`` is there.
        reads_confidence: ``widths`` gets how sure the drafter is of each position.
    """

    reads_outcomes: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = False
    reads_confidence: bool = False

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def observe(self, step: VerifiedStep) -> None:  # noqa: B027  most policies learn nothing
        """Learn from a step of the target."""

    def limit(self, slots: np.ndarray) -> int:
        """An upper bound of what ``widths`` will answer for this batch; 0 saves the drafting."""
        return self.num_drafts

    def block_widths(self, slots: np.ndarray) -> np.ndarray:
        """``[rows]``, 0 to N: how wide each row's draft block has to be, before it is drafted."""
        return np.full(len(slots), self.num_drafts)

    @abstractmethod
    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """``[rows]`` int, 0 to N: drafts of each row that the next step verifies.

        Args:
            slots: ``[rows]``.
            confidence: ``[rows, N]`` fp32, the drafter's probability of the likeliest token at each
                position; None unless ``reads_confidence``.
            before_end: ``[rows]``, the drafts before the first one that ends the answer. To verify
                more gains nothing: if these are kept, the target's own next token ends it as well.
        """


class FixedWidth(WidthPolicy):
    """The same width for everyone; 0 turns drafting off."""

    def __init__(self, num_drafts: int, width: int | None = None) -> None:
        super().__init__(num_drafts)
        self.width = num_drafts if width is None else width

    def limit(self, slots: np.ndarray) -> int:
        """The width itself."""
        return self.width

    def block_widths(self, slots: np.ndarray) -> np.ndarray:
        """The width, for every row."""
        return np.full(len(slots), self.width)

    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """The same, wherever the answer ends."""
        return self.block_widths(slots)
