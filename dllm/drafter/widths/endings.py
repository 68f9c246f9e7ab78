"""Estimates how much of a draft block lies before the end of the answer.

It gains nothing to verify a draft that ends the answer, or those after it: if all drafts before it
are kept, the target's own next token ends the answer in the same step. Where answers are short,
little of a block is left. Once a block has been drafted this is known; the estimate here is for
deciding whether to draft the next one. It also learns from answers that were decoded without
drafting: when such an answer is over, its length says where the first block would have ended.
"""

import numpy as np

# Each new block multiplies earlier counts by this, because the questions of a server change. The
# memory is short (about 8 blocks): short answers are over soon, so they have to be noticed soon.
KEPT = 1 - 1 / 8
# Guess of the share of blocks that end at a place, before any is counted, and its weight in blocks.
FIRST_GUESS, STRENGTH = 1 / 32, 1.0


class Endings:
    """Fading counts over the blocks of all requests, by place in the block.

    Attributes:
        goes_on: ``[N]``, not increasing: the share of blocks in which the answer does not end up to
            and including each place.
    """

    def __init__(self, num_drafts: int) -> None:
        self._places = np.arange(num_drafts)
        self._ended = np.zeros(num_drafts)  # blocks whose ending draft stands at this place
        self._reached = np.zeros(num_drafts)  # blocks without an ending draft before this place
        self._update()

    def observe(self, before_end: np.ndarray) -> None:
        """Count some blocks.

        Args:
            before_end: ``[blocks]``, number of drafts before the one that ends the answer; N if
                none does.
        """
        fading = KEPT ** len(before_end)
        ended = (self._places == before_end[:, None]).sum(axis=0)
        reached = (self._places <= before_end[:, None]).sum(axis=0)
        self._ended = self._ended * fading + ended
        self._reached = self._reached * fading + reached
        self._update()

    def _update(self) -> None:
        share = (self._ended + STRENGTH * FIRST_GUESS) / (self._reached + STRENGTH)
        self.goes_on: np.ndarray = np.cumprod(1 - share)
