"""Splits each row of a step's batch into a causal head and a bidirectional canvas.

A row of the batch is one request; its query span is the tokens that are scheduled for it. No flag
says whether a request is in its prompt or denoises: it follows from the schedule, in which the
canvas counts as draft tokens (the core rule of ARCHITECTURE.md):

    head_len = query_len - num_draft_tokens
    tokens [0, head_len)          causal, KV kept, no logits  (a prompt chunk, or an emitted block)
    tokens [head_len, query_len)  the canvas: bidirectional, with logits

In a model with blocks of B > 1 tokens, a head token at position p sees its own block, too: the keys
before min((p // B + 1) * B, seq_len). Of a block that is not whole yet, no KV is kept. Its tokens
are the *tail* of the head. They are in front of the canvas in every step, and see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class VirtualSequences(NamedTuple):
    """The batch for attention backends that take one causal flag for each sequence.

    A row with a head and a canvas becomes two sequences over the same KV pages: its head, causal,
    and its canvas, bidirectional. Positions, slot mappings and logits belong to tokens, not to
    sequences, and stay as they are.

    Attributes:
        row_of: [S] int64, the batch row that a sequence belongs to.
        query_start_loc: [S + 1] int32, where each sequence's tokens start.
        seq_lens: [S] int32, tokens of context and query together.
        is_causal: [S] int32, 1 or 0.
        images: for each sequence that is an image, its first and last position. None: no images.
    """

    row_of: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    is_causal: np.ndarray
    images: dict[int, list[tuple[int, int]]] | None = None

    def with_images(self, images: Sequence[Sequence[tuple[int, int]]]) -> "VirtualSequences":
        """Make every image of the causal sequences a bidirectional sequence of its own.

        Such a sequence ends with the image's last token, so the image sees what is in front of it
        and itself.

        Args:
            images: for each batch row, (first, last) position of each of its images, in order.
        """
        parts: list[tuple[int, int, int, int]] = []  # row, query length, sequence length, causal
        found: dict[int, list[tuple[int, int]]] = {}
        lens = np.diff(self.query_start_loc)
        for row, length, stop, is_causal in zip(
            self.row_of.tolist(), lens.tolist(), self.seq_lens.tolist(), self.is_causal.tolist(),
            strict=True,
        ):  # fmt: skip
            start = stop - length
            for first, last in images[row] if is_causal else ():
                begin, end = max(first, start), min(last + 1, stop)
                if begin >= end:  # the image is in an earlier or a later chunk of the prompt
                    continue
                if start < begin:
                    parts.append((row, begin - start, begin, 1))
                found[len(parts)] = [(first, last)]
                parts.append((row, end - begin, end, 0))
                start = end
            if start < stop:
                parts.append((row, stop - start, stop, is_causal))
        rows, lengths, ends, flags = np.array(parts, dtype=np.int32).T
        return VirtualSequences(
            row_of=rows.astype(np.int64),
            query_start_loc=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            seq_lens=ends.copy(),
            is_causal=flags.copy(),
            images=found or None,
        )


@dataclass(frozen=True)
class Spans:
    """How long the head and the canvas of every row of a batch are: host arrays, [R] int32."""

    head_lens: np.ndarray
    canvas_widths: np.ndarray

    @classmethod
    def of_schedule(cls, query_lens: np.ndarray, num_draft_tokens: np.ndarray | None) -> "Spans":
        """The spans of a scheduled batch.

        Args:
            query_lens: [R], tokens that are scheduled for each row.
            num_draft_tokens: [R], how many of them are canvas tokens. None: no row has a canvas.
        """
        if num_draft_tokens is None:
            num_draft_tokens = np.zeros_like(query_lens)
        head_lens = query_lens - num_draft_tokens
        assert (head_lens >= 0).all(), f"canvas longer than its row: {query_lens=}, {head_lens=}"
        return cls(head_lens.astype(np.int32), num_draft_tokens.astype(np.int32))

    def tail_lens(self, seq_lens: np.ndarray, block_size: int) -> np.ndarray:
        """How many tokens of each head are in a block that is not whole yet: [R].

        Args:
            seq_lens: [R], tokens of context and query together, of each row.
        """
        return np.minimum((seq_lens - self.canvas_widths) % block_size, self.head_lens)

    def virtual_sequences(self, seq_lens: np.ndarray, block_size: int = 1) -> VirtualSequences:
        """The same batch as sequences that are causal or bidirectional as a whole.

        Args:
            seq_lens: [R], tokens of context and query together, of each row.
            block_size: of the model.
        """
        if block_size > 1:
            return self._block_sequences(seq_lens, block_size)
        num_rows = len(self.head_lens)
        # [2 * R]: head, canvas, head, canvas, ... Empty heads and canvases are dropped below.
        lens = np.stack([self.head_lens, self.canvas_widths], axis=1).reshape(-1)
        ends = np.stack([seq_lens - self.canvas_widths, seq_lens], axis=1).reshape(-1)
        row_of = np.repeat(np.arange(num_rows, dtype=np.int64), 2)
        is_causal = np.tile(np.array([1, 0], dtype=np.int32), num_rows)
        kept = lens > 0
        query_start_loc = np.concatenate(([0], np.cumsum(lens[kept])))
        return VirtualSequences(
            row_of=row_of[kept],
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=ends[kept].astype(np.int32),
            is_causal=is_causal[kept],
        )

    def _block_sequences(self, seq_lens: np.ndarray, block_size: int) -> VirtualSequences:
        """Each block of a head as a bidirectional sequence; the last one may hold the canvas."""
        query_lens = self.head_lens + self.canvas_widths
        starts = seq_lens - query_lens
        # A row is cut at the ends of its blocks. A canvas ends with its block, or the context does.
        num_blocks = -(-seq_lens // block_size) - starts // block_size
        row_of = np.repeat(np.arange(len(seq_lens), dtype=np.int64), num_blocks)
        nth = np.arange(len(row_of)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
        first_block = starts[row_of] // block_size + nth
        ends = np.minimum((first_block + 1) * block_size, seq_lens[row_of])
        lens = ends - np.maximum(first_block * block_size, starts[row_of])
        return VirtualSequences(
            row_of=row_of,
            query_start_loc=np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
            seq_lens=ends.astype(np.int32),
            is_causal=np.zeros(len(row_of), dtype=np.int32),
        )
