"""Which keys a query row sees: the specification that every kernel is tested against.

A batch is a list of sequences. A sequence has ``seq_len`` keys at positions 0 .. seq_len - 1, and a
forward pass computes its last ``query_len`` positions, the *query rows*: row i is at position
``seq_len - query_len + i``. The rows of a sequence are all of one kind:

    causal          a row at position p sees the keys before (p // B + 1) * B, the end of its block.
                    The model was trained with blocks of B positions; B = 1 gives keys 0 .. p
    bidirectional   a row sees all keys of the sequence

One request may be several sequences with the same keys. A step that writes the keys of a finished
block and denoises the next canvas is two, here with blocks of 32 after a context of 96 positions:

    position     0              96        128       160
                 |   context    |  block  |  canvas |
    sequence 1                  [ causal  )             query_len 32, seq_len 128
    sequence 2                            [ bidirect. ) query_len 32, seq_len 160

A prompt chunk is one causal sequence, a canvas alone one bidirectional sequence. What shares a
block with the canvas belongs to the canvas' sequence. An image of a prompt, whose tokens see each
other, is a bidirectional sequence between the causal ones of the text around it.

In a sliding-window layer a row at position p sees no key at a distance of W or more: it sees
p - W + 1 .. p + W - 1. So W counts the row itself, as in vLLM's kernels and in the causal mask of
Hugging Face. (Its ``sliding_window_bidirectional_overlay(w)`` includes both ends: W = w + 1.) This
is the *symmetric* window.

A bidirectional sequence may have a ``first_key`` instead of the window: each of its rows sees the
keys from there on. With the *anchored* window a canvas has one, W - 1 keys before its first row
(``anchor``), because the sliding cache of Hugging Face's DiffusionGemma decoder holds W - 1 keys.
Images have none: they have the symmetric window, as in its encoder. No model has both windows and
blocks.

Every row sees one contiguous range of keys, so a kernel needs two integers per row and no mask.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuerySpan:
    """The query rows of one sequence in one forward pass; lengths in tokens.

    ``first_key``: None lets the layer's window decide. ``seq_len`` may be shorter than
    ``query_len``, with the first rows at negative positions: a drafter shortens ``seq_len`` to
    draft fewer tokens. Raises ValueError for negative lengths and for causal rows with a first key.
    """

    query_len: int
    seq_len: int
    is_causal: bool
    first_key: int | None = None

    def __post_init__(self) -> None:
        if self.query_len < 0 or self.seq_len < 0:
            raise ValueError(
                f"query_len is {self.query_len} and seq_len is {self.seq_len}, both must be >= 0"
            )
        if self.is_causal and self.first_key is not None:
            raise ValueError(f"first_key is {self.first_key}, causal rows have none")

    @property
    def start(self) -> int:
        """Position of row 0: the number of keys before the rows."""
        return self.seq_len - self.query_len

    def position(self, row: int) -> int:
        """Position of row ``row``. Raises IndexError for a row that there is not."""
        if not 0 <= row < self.query_len:
            raise IndexError(f"row is {row}, the span has rows 0 .. {self.query_len - 1}")
        return self.start + row


def anchor(span: QuerySpan, window: int) -> int:
    """The first visible key of a canvas in a layer with an anchored window of this size."""
    return max(span.start - (window - 1), 0)


def may_attend(
    row: int, key: int, span: QuerySpan, window: int | None = None, block_size: int = 1
) -> bool:
    """Whether row ``row`` of the span sees the key at position ``key``.

    This is the definition. A key outside the sequence is never seen. Raises IndexError when the
    row is not in the span.
    """
    pos = span.position(row)
    if not 0 <= key < span.seq_len:
        return False
    if span.is_causal and key // block_size > pos // block_size:
        return False
    if span.first_key is not None:
        return key >= span.first_key
    return window is None or abs(pos - key) < window


def visible_range(
    row: int, span: QuerySpan, window: int | None = None, block_size: int = 1
) -> tuple[int, int]:
    """The keys that row ``row`` sees, as a half-open range ``(start, stop)``.

    The same answer as `may_attend`, without a loop over keys; `canvas_attention.row_bounds`
    computes it on the device. ``start <= stop`` always. A row with an empty range sees nothing; its
    output is 0.
    """
    pos = span.position(row)
    start, stop = 0, (pos // block_size + 1) * block_size if span.is_causal else span.seq_len
    if span.first_key is not None:
        start = span.first_key
    elif window is not None:
        start, stop = pos - (window - 1), min(stop, pos + window)
    stop = min(max(stop, 0), span.seq_len)
    return min(max(start, 0), stop), stop


def picture(span: QuerySpan, window: int | None = None, block_size: int = 1) -> str:
    """The mask of a span as text: a line for each row, in it an 'x' for each key that it sees."""
    return "\n".join(
        "".join(
            "x" if may_attend(row, key, span, window, block_size) else "."
            for key in range(span.seq_len)
        )
        for row in range(span.query_len)
    )
