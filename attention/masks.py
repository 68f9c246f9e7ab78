"""Which keys a query row sees: the specification that every kernel is tested against.

One sequence has ``seq_len`` keys at positions 0 .. seq_len - 1. One forward pass computes its last
``query_len`` positions, the *query span*; row i of the span sits at position ``context_len + i``.

    position   0                context_len                        seq_len
               |    context         |    head        |    canvas      |
    row                             0        bidirectional_from    query_len

Rows before ``bidirectional_from`` are the head; they are causal. Rows from there on are the canvas;
they are bidirectional. So ``bidirectional_from`` says what kind of pass it is for a sequence:

    query_len   all rows causal: a prompt, or a finished block whose keys enter the cache (commit)
    0           all rows bidirectional: a denoise step
    between     both in one pass: a finished block, then the first denoise step of the next canvas
    negative    all rows bidirectional, with the symmetric window on every layer: an image

A model may be trained with blocks of ``block_size`` B > 1 positions: [0, B), [B, 2 B), ... A head
row at position p then sees its whole block, the keys before min((p // B + 1) * B, seq_len); B = 1
is the causal rule. In the last block of the head, that includes the canvas, if there is one.

On sliding-window layers a window of size W counts the query itself, as vLLM and Hugging Face's
causal mask do: a causal row at position p sees keys p - W + 1 .. p. For bidirectional rows there
are two kinds of window:

    symmetric   |pos_q - pos_k| < W: every row has a range of its own, as in vLLM's kernels
    anchored    canvas_start - (W - 1) .. the last key: all canvas rows see the same range, as in
                Hugging Face's DiffusionGemma decoder, whose sliding cache holds W - 1 keys. The
                images of a prompt have the symmetric window, as in its encoder

Hugging Face's ``sliding_window_bidirectional_overlay(w)`` includes both ends,
``|pos_q - pos_k| <= w``: it is the symmetric window of size w + 1. No model has both windows and
blocks.

Every row sees one contiguous range of keys, so a kernel needs two integers per row and no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WindowKind = Literal["symmetric", "anchored"]


@dataclass(frozen=True)
class Window:
    """How far rows of a sliding-window layer look; ``size`` is in keys and counts the query itself.

    Raises ValueError for an unknown kind or a size below 1.
    """

    kind: WindowKind
    size: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(WindowKind):
            raise ValueError(f"window kind is {self.kind!r}, allowed are {get_args(WindowKind)}")
        if self.size < 1:
            raise ValueError(f"window size is {self.size}, it counts the query itself: at least 1")


@dataclass(frozen=True)
class QuerySpan:
    """The query span of one sequence in one forward pass; all three values in tokens.

    ``bidirectional_from`` above query_len means query_len: a kernel reads it on the device, where
    an error cannot be raised. ``seq_len`` may be shorter than ``query_len``, with the first rows at
    negative positions: a drafter shortens ``seq_len`` to draft fewer tokens.
    """

    query_len: int
    seq_len: int
    bidirectional_from: int

    def __post_init__(self) -> None:
        if self.query_len < 0 or self.seq_len < 0:
            raise ValueError(
                f"query_len is {self.query_len} and seq_len is {self.seq_len}, both must be >= 0"
            )

    @property
    def context_len(self) -> int:
        """Position of row 0: the number of keys before the span."""
        return self.seq_len - self.query_len

    @property
    def split_point(self) -> int:
        """Row at which rows stop being causal, within [0, query_len]."""
        return min(max(self.bidirectional_from, 0), self.query_len)

    @property
    def canvas_start(self) -> int:
        """Position of the first bidirectional row; what an anchored window is anchored to."""
        return self.context_len + self.split_point

    @property
    def is_image(self) -> bool:
        """Whether the rows are an image, which no window is anchored to."""
        return self.bidirectional_from < 0

    def position(self, row: int) -> int:
        """Position of row ``row`` of the span. Raises IndexError outside the span."""
        if not 0 <= row < self.query_len:
            raise IndexError(f"row is {row}, the span has rows 0 .. {self.query_len - 1}")
        return self.context_len + row

    def is_causal(self, row: int) -> bool:
        """Whether row ``row`` belongs to the causal head."""
        return row < self.split_point


def may_attend(
    row: int, key: int, span: QuerySpan, window: Window | None = None, block_size: int = 1
) -> bool:
    """Whether row ``row`` of the span sees the key at position ``key``.

    This is the definition. A key outside the sequence is never seen. Raises IndexError when the
    row is not in the span.
    """
    pos = span.position(row)
    if not 0 <= key < span.seq_len:
        return False
    if span.is_causal(row):
        return key // block_size <= pos // block_size and (
            window is None or pos - key < window.size
        )
    if window is None:
        return True
    if window.kind == "symmetric" or span.is_image:
        return abs(pos - key) < window.size
    return key > span.canvas_start - window.size


def visible_range(
    row: int, span: QuerySpan, window: Window | None = None, block_size: int = 1
) -> tuple[int, int]:
    """The keys that row ``row`` sees, as a half-open range ``(start, stop)``.

    The same answer as `may_attend`, without a loop over keys; `row_tiles.row_bounds` computes it on
    the device. ``start <= stop`` always. A row with an empty range sees nothing; its output is 0.
    """
    pos = span.position(row)
    causal = span.is_causal(row)
    start = 0
    stop = (pos // block_size + 1) * block_size if causal else span.seq_len
    if window is not None:
        is_anchored_row = window.kind == "anchored" and not causal and not span.is_image
        start = (span.canvas_start if is_anchored_row else pos) - (window.size - 1)
        if not is_anchored_row:
            stop = min(stop, pos + window.size)
    stop = min(max(stop, 0), span.seq_len)
    return min(max(start, 0), stop), stop


def picture(span: QuerySpan, window: Window | None = None, block_size: int = 1) -> str:
    """The mask of a span as text: a line for each row, in it an 'x' for each key that it sees."""
    return "\n".join(
        "".join(
            "x" if may_attend(row, key, span, window, block_size) else "."
            for key in range(span.seq_len)
        )
        for row in range(span.query_len)
    )
