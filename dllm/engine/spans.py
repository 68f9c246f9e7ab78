"""What each row of a step's batch is: a causal head and a bidirectional canvas.

There is no phase flag anywhere. The schedule says it all (the core rule of ARCHITECTURE.md):

    head_len = query_len - num_draft_tokens
    rows [0, head_len)          causal, KV kept, no logits  (a prompt chunk, or an emitted block)
    rows [head_len, query_len)  the canvas: bidirectional, with logits
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class VirtualSequences(NamedTuple):
    """Causal-or-not sequences for attention backends that know one flag per sequence.

    A row with a head and a canvas becomes two sequences over the same pages, (head rows, causal)
    and (canvas rows, bidirectional); positions, slot mappings and logits do not notice.

    Attributes:
        row_of: [S] int64, the batch row a sequence belongs to.
        query_start_loc: [S + 1] int32.
        seq_lens: [S] int32, tokens of context and query together.
        is_causal: [S] int32, 1 or 0.
        images: sequence -> positions (first, last) of the image that it is, if any are.
    """

    row_of: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    is_causal: np.ndarray
    images: dict[int, list[tuple[int, int]]] | None = None

    def with_images(self, images: Sequence[Sequence[tuple[int, int]]]) -> "VirtualSequences":
        """Cut the images out of the causal sequences: bidirectional sequences that end with them.

        Args:
            images: per batch row, (first, last) position of each of its images, in order.
        """
        parts: list[tuple[int, int, int, int]] = []  # row, length, sequence length, causal
        found: dict[int, list[tuple[int, int]]] = {}
        lens = np.diff(self.query_start_loc)
        for row, length, stop, is_causal in zip(
            self.row_of.tolist(), lens.tolist(), self.seq_lens.tolist(), self.is_causal.tolist(),
            strict=True,
        ):  # fmt: skip
            start = stop - length
            for first, last in images[row] if is_causal else ():
                begin, end = max(first, start), min(last + 1, stop)
                if begin >= end:  # computed before, or in a later chunk
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
    """The head and the canvas of every row of one batch (host arrays, [R] int32)."""

    head_lens: np.ndarray
    canvas_widths: np.ndarray

    @classmethod
    def of_schedule(cls, query_lens: np.ndarray, num_draft_tokens: np.ndarray | None) -> "Spans":
        """Read the spans off the schedule.

        Args:
            query_lens: [R] tokens scheduled per row.
            num_draft_tokens: [R] canvas tokens among them, or None when there are none.
        """
        if num_draft_tokens is None:
            num_draft_tokens = np.zeros_like(query_lens)
        head_lens = query_lens - num_draft_tokens
        assert (head_lens >= 0).all(), f"canvas longer than its row: {query_lens=}, {head_lens=}"
        return cls(head_lens.astype(np.int32), num_draft_tokens.astype(np.int32))

    def virtual_sequences(self, seq_lens: np.ndarray) -> VirtualSequences:
        """Split each row where its canvas starts.

        Args:
            seq_lens: [R] tokens of context and query together, per row.
        """
        num_rows = len(self.head_lens)
        # Interleaved as head, canvas, head, canvas, ...; empty halves are dropped.
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
