"""The interface of width policies, which decide how many drafts of a request the target verifies.

The drafter drafts N tokens for every request in one pass. What a policy can make smaller is
verification: for each request and step it answers with a width from 0 (verify nothing, an ordinary
decode step) to N. The output is that of the target for any answer: drafts that are not verified are
not used.
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
        in_prompt: ``[rows]`` bool: the row computed prompt tokens. What a policy stored about this
            slot is then about an earlier request.
        samples: ``[rows]`` bool: the row emitted tokens. In a prompt only its last chunk does.
        verified, accepted: ``[rows]`` number of drafts that the target verified, and that it kept.
        prompt_logits: ``[rows with in_prompt and samples, vocab]``, the target's logits after the
            last prompt token; None unless ``WidthPolicy.reads_prompt``.
    """

    slots: np.ndarray
    in_prompt: np.ndarray
    samples: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    prompt_logits: torch.Tensor | None = None


class WidthPolicy(ABC):
    """Chooses the width of every row, step by step.

    After each step of the target the speculator calls ``observe`` (if ``reads_outcomes``), then
    ``limit``. If the limit is 0 it drafts nothing; otherwise it drafts and calls ``widths``.

    Attributes:
        reads_outcomes: ``observe`` is called; it costs one wait for the device per step.
        reads_prompt: ``VerifiedStep.prompt_logits`` is given.
        reads_confidence: ``widths`` is given the drafter's probabilities.
    """

    reads_outcomes: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = False
    reads_confidence: bool = False

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def observe(self, step: VerifiedStep) -> None:  # noqa: B027  most policies learn nothing
        """Learn from a step of the target."""

    def limit(self, slots: np.ndarray) -> int:
        """An upper bound of what ``widths`` will answer for this batch; at 0 nothing is drafted."""
        return self.num_drafts

    def block_widths(self, slots: np.ndarray) -> np.ndarray:
        """``[rows]``, 0 to N: the width of each row's draft block, asked before it is drafted."""
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
            before_end: ``[rows]``, number of drafts before the first one that ends the answer.
                Verifying more than these gains nothing: if all of them are kept, the target's own
                next token, which every step samples, ends the answer too.
        """


class FixedWidth(WidthPolicy):
    """The same width for every request, N if not given; 0 turns drafting off."""

    def __init__(self, num_drafts: int, width: int | None = None) -> None:
        super().__init__(num_drafts)
        self.width = num_drafts if width is None else width

    def limit(self, slots: np.ndarray) -> int:
        """The width itself."""
        return self.width

    def block_widths(self, slots: np.ndarray) -> np.ndarray:
        """The same width for every row."""
        return np.full(len(slots), self.width)

    def widths(
        self, slots: np.ndarray, confidence: np.ndarray | None, before_end: np.ndarray
    ) -> np.ndarray:
        """The same width for every row, also where a draft ends the answer."""
        return self.block_widths(slots)
