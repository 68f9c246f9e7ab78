"""Drafts on the target's host: what followed the last tokens of a request where they stood before.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). Needs
no model and no network: it is a kind of drafting of its own, and what is left while no worker
answers.
"""

import struct
from collections.abc import Sequence

TOKEN_BYTES = 4


class Ngrams:
    """Texts of requests, as bytes that are searched from their end.

    Args:
        shortest, longest: how many last tokens have to stand somewhere before; more are tried
            first.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._texts: dict[str, bytearray] = {}

    def end(self, name: str) -> None:
        """A request is over."""
        self._texts.pop(name, None)

    def drafts(self, name: str, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that may follow; ``tokens`` go on from those of the last call."""
        text = self._texts.setdefault(name, bytearray())
        new = tokens[len(text) // TOKEN_BYTES :]
        text += struct.pack(f"<{len(new)}I", *new)
        for length in self._lengths:
            place = _last_before_end(text, length * TOKEN_BYTES)
            if place >= 0:
                start = place // TOKEN_BYTES + length
                return list(tokens[start : start + limit])
        return []


def _last_before_end(text: bytearray, size: int) -> int:
    """Where the last ``size`` bytes stood before, at the start of a token; -1 if they did not."""
    if size >= len(text):
        return -1
    end = len(text) - 1
    while True:
        place = text.rfind(text[-size:], 0, end)
        if place % TOKEN_BYTES == 0 or place < 0:
            return place
        end = place + size - 1
