"""What each row of a step's batch is: a causal head and a bidirectional canvas.

There is no phase flag anywhere. The schedule says it all (the core rule of ARCHITECTURE.md):

    head_len = query_len - num_draft_tokens
    rows [0, head_len)          causal, KV kept, no logits  (a prompt chunk, or an emitted block)
    rows [head_len, query_len)  the canvas: bidirectional, with logits
"""

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
    """

    row_of: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    is_causal: np.ndarray


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

    @property
    def has_heads_before_canvases(self) -> bool:
        """Whether some row holds both a head and a canvas."""
        return bool(((self.head_lens > 0) & (self.canvas_widths > 0)).any())

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
