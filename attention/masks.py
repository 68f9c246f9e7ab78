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

With the *anchored* window a canvas has a *first key* instead, W - 1 keys before its first row: each
of its rows sees the keys from there on, because the sliding cache of Hugging Face's DiffusionGemma
decoder holds W - 1 keys. Images have the symmetric window in such a layer, too, as in its encoder.
No model has both windows and blocks.

Every row sees one contiguous range of keys, so a kernel needs two integers per row and no mask.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuerySpan:
    """The query rows of one sequence in one forward pass; lengths in tokens.

    ``seq_len`` may be shorter than ``query_len``, with the first rows at negative positions: a
    drafter shortens it to draft fewer tokens. Raises ValueError for negative lengths and for an
    image that is causal.
    """

    query_len: int
    seq_len: int
    is_causal: bool
    is_image: bool = False

    def __post_init__(self) -> None:
        if self.query_len < 0 or self.seq_len < 0:
            raise ValueError(
                f"query_len is {self.query_len} and seq_len is {self.seq_len}, both must be >= 0"
            )
        if self.is_causal and self.is_image:
            raise ValueError("is_image and is_causal are true: rows of an image see each other")

    @property
    def start(self) -> int:
        """Position of row 0."""
        return self.seq_len - self.query_len

    def position(self, row: int) -> int:
        """Raises IndexError for a row that there is not."""
        if not 0 <= row < self.query_len:
            raise IndexError(f"row is {row}, the span has rows 0 .. {self.query_len - 1}")
        return self.start + row


@dataclass(frozen=True)
class Mask:
    """Which keys the rows of a layer see.

    window: W; None: no window. is_anchored: a canvas has a first key instead of the window.
    block_length: B; 1: there are no blocks. Raises ValueError for an anchor without a window, and
    for blocks beside one.
    """

    window: int | None = None
    is_anchored: bool = False
    block_length: int = 1

    def __post_init__(self) -> None:
        if self.is_anchored and self.window is None:
            raise ValueError("is_anchored is true: only layers with a window can be anchored")
        if self.block_length > 1 and self.window is not None:
            raise ValueError(
                f"block_length is {self.block_length} and window {self.window}: only one of them"
            )

    def __str__(self) -> str:
        if self.block_length > 1:
            return "blocks"
        if self.window is None:
            return "unbounded"
        return "anchored" if self.is_anchored else "symmetric"

    def first_key(self, span: QuerySpan) -> int | None:
        """The first key that each row of a canvas sees; None where the window decides."""
        if self.window is None or not self.is_anchored or span.is_causal or span.is_image:
            return None
        return max(span.start - (self.window - 1), 0)


ALL = Mask()


def may_attend(row: int, key: int, span: QuerySpan, mask: Mask = ALL) -> bool:
    """The definition; a key outside the sequence is never seen. Raises as ``position``."""
    pos = span.position(row)
    if not 0 <= key < span.seq_len:
        return False
    if span.is_causal and key // mask.block_length > pos // mask.block_length:
        return False
    if (first_key := mask.first_key(span)) is not None:
        return key >= first_key
    return mask.window is None or abs(pos - key) < mask.window


def visible_range(row: int, span: QuerySpan, mask: Mask = ALL) -> tuple[int, int]:
    """The keys that a row sees by `may_attend`, as a half-open range; `canvas_attention.row_bounds`
    computes it on the device. ``start <= stop``; the output of a row that sees nothing is 0.
    """
    pos, size = span.position(row), mask.block_length
    start, stop = 0, (pos // size + 1) * size if span.is_causal else span.seq_len
    if (first_key := mask.first_key(span)) is not None:
        start = first_key
    elif mask.window is not None:
        start, stop = pos - (mask.window - 1), min(stop, pos + mask.window)
    stop = min(max(stop, 0), span.seq_len)
    return min(max(start, 0), stop), stop
