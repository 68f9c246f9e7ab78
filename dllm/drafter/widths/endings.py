"""How often a draft block goes on past each place before a draft ends the answer.

A draft that ends the answer gains nothing: if all before it are kept, the target's own next token
ends it in the same step. Where answers are short that is most of the block, which is known of a
block when it has been drafted, and here of those to come. An answer that nobody drafted for says it
too, when it is over: of the block that would have stood behind its prompt.
"""

import numpy as np

# Of earlier counts, for each block: what is asked changes, and short answers are soon over.
KEPT = 1 - 1 / 8
FIRST_GUESS, STRENGTH = 1 / 32, 1.0  # of the share that ends at a place; its weight in blocks


class Endings:
    """Counts over the blocks of all requests.

    Attributes:
        goes_on: ``[N]``, not increasing: the share of blocks with no ending draft up to each place.
    """

    def __init__(self, num_drafts: int) -> None:
        self._places = np.arange(num_drafts)
        self._ended = np.zeros(num_drafts)
        self._reached = np.zeros(num_drafts)
        self._update()

    def observe(self, before_end: np.ndarray) -> None:
        """Count blocks: ``[blocks]``, the drafts of each before its first that ends the answer."""
        fading = KEPT ** len(before_end)
        ended = (self._places == before_end[:, None]).sum(axis=0)
        reached = (self._places <= before_end[:, None]).sum(axis=0)
        self._ended = self._ended * fading + ended
        self._reached = self._reached * fading + reached
        self._update()

    def _update(self) -> None:
        share = (self._ended + STRENGTH * FIRST_GUESS) / (self._reached + STRENGTH)
        self.goes_on: np.ndarray = np.cumprod(1 - share)
