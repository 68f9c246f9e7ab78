"""Drafts from the request's own text: what stood behind the same tokens before.

The longest end of a text that also stands further in front is looked up, and what followed it there
is drafted. If the latter reaches the end of the text, it goes on from its beginning. Known as
prompt lookup (A. Saxena, 2023) or n-gram drafts.
"""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.request import Request

# A match of m tokens is expected to go on with probability m / (m + DOUBT). In English pages, cut
# into words, 14, 34, 47 and 50 % of the matches of 1, 2, 3 and 4 words went on.
DOUBT = 4
WINDOW = 2048  # tokens at the end of a text that are searched
LONGEST = 16  # a longer match counts as one of so many tokens


def look_up(text: np.ndarray, num_drafts: int) -> tuple[np.ndarray, int]:
    """What followed the end of a text (one token or more) before; of equally long matches the last.

    Returns ``[num_drafts]``, any tokens without a match, and the match's length, 0 to LONGEST.
    """
    text = text[-WINDOW:]
    last = len(text) - 1
    places = np.flatnonzero(text[:-1] == text[-1])  # where matches end
    length = 0
    while len(places):
        length, place = length + 1, int(places[-1])
        if length == LONGEST:
            break
        places = places[places >= length]
        places = places[text[places - length] == text[last - length]]
    if not length:
        return np.zeros(num_drafts, dtype=text.dtype), 0
    return text[place + 1 + np.arange(num_drafts) % (last - place)], length


class Lookup(NamedTuple):
    """What is drafted for R requests."""

    tokens: np.ndarray  # [R, N]
    # [R, N]: how likely each draft is kept, if those in front of it are. 0 for tokens that end an
    # answer, because verifying them gains nothing.
    confidence: np.ndarray


class Lookups:
    """Looks up drafts in the texts of running requests; ``end_ids`` end an answer."""

    def __init__(self, num_drafts: int, end_ids: Collection[int]) -> None:
        self.num_drafts, self.end_ids = num_drafts, list(end_ids)
        self._texts: dict[str, array[int]] = {}  # of the requests of the last step

    def of(self, requests: Sequence[Request]) -> Lookup:
        """Drafts of at least one request."""
        self._texts = {one.request_id: self._text_of(one) for one in requests}
        texts = (np.frombuffer(text, dtype=np.int64) for text in self._texts.values())
        found = [look_up(text, self.num_drafts) for text in texts]
        tokens = np.stack([each for each, _ in found])
        lengths = np.array([length for _, length in found])[:, None]
        matched = lengths + np.arange(self.num_drafts)
        is_useful = (lengths > 0) & ~np.isin(tokens, self.end_ids)
        return Lookup(tokens, np.where(is_useful, matched / (matched + DOUBT), 0.0))

    def _text_of(self, request: Request) -> "array[int]":
        """All tokens of a request; those of the last step are copied once."""
        text = self._texts.get(request.request_id) or array("q")
        if len(text) > request.num_tokens:  # a session whose input was changed
            text = array("q")
        text.extend(request.all_token_ids[len(text) :])
        return text
