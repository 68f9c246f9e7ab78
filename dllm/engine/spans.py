"""Reads off the schedule which tokens of a step are causal, and describes the step as sequences.

A request's tokens are those that are scheduled for it. No flag says whether it is in its prompt or
denoises: it follows from the schedule, in which the canvas counts as draft tokens (the core rule of
ARCHITECTURE.md):

    causal_len = query_len - num_draft_tokens
    tokens [0, causal_len)          causal, KV kept, no logits  (of a prompt, or an emitted block)
    tokens [causal_len, query_len)  the canvas: bidirectional, with logits

Attention takes sequences, each of which is causal or bidirectional as a whole
(``attention.masks``). A request with a causal span and a canvas is two sequences over the same KV
pages. Positions, slot mappings and logits belong to tokens, and stay as they are.

In a model with blocks of B > 1 tokens, a causal token sees its own block, too. If a causal span
ends within a block, the tokens of that block are the *tail* of the causal span. No KV is kept of
them, because the block is not whole yet. They are in front of the canvas in every step, and part of
its sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dllm.attention.ragged import starts_of


class Sequences(NamedTuple):
    """A batch as attention takes it: S sequences in the order of their tokens."""

    request_of: np.ndarray  # [S] int64, whose tokens they are
    query_start_loc: np.ndarray  # [S + 1] int32, where each sequence's tokens start
    seq_lens: np.ndarray  # [S] int32, tokens of context and query together
    is_causal: np.ndarray  # [S] int32, 1 or 0
    # For each sequence that is an image, its first and last position.
    images: dict[int, list[tuple[int, int]]] | None = None

    def with_images(self, images: Sequence[Sequence[tuple[int, int]]]) -> "Sequences":
        """Make every image of the causal sequences a bidirectional one, which ends with its last
        token. ``images``: for each request, (first, last) position of each, in order.
        """
        parts: list[tuple[int, int, int, int]] = []  # row, query length, sequence length, causal
        found: dict[int, list[tuple[int, int]]] = {}
        lens = np.diff(self.query_start_loc)
        columns = (self.request_of, lens, self.seq_lens, self.is_causal)
        for row, length, stop, is_causal in zip(*(one.tolist() for one in columns), strict=True):
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
        return Sequences(
            request_of=rows.astype(np.int64),
            query_start_loc=starts_of(lengths).astype(np.int32),
            seq_lens=ends.copy(),
            is_causal=flags.copy(),
            images=found or None,
        )


@dataclass(frozen=True)
class Spans:
    """How long each request's causal span and canvas are: host arrays, [R] int32."""

    causal_lens: np.ndarray
    canvas_widths: np.ndarray

    @classmethod
    def of_schedule(cls, query_lens: np.ndarray, num_draft_tokens: np.ndarray | None) -> "Spans":
        """``query_lens``: [R], tokens scheduled for each request, those of canvases among them."""
        if num_draft_tokens is None:
            num_draft_tokens = np.zeros_like(query_lens)
        causal_lens = query_lens - num_draft_tokens
        assert (causal_lens >= 0).all(), (
            f"a canvas longer than what is scheduled: {query_lens=}, {causal_lens=}"
        )
        return cls(causal_lens.astype(np.int32), num_draft_tokens.astype(np.int32))

    def tail_lens(self, block_size: int) -> np.ndarray:
        """[R]. A causal span starts where a block starts: KV is kept of whole blocks only."""
        return self.causal_lens % block_size

    def sequences(self, seq_lens: np.ndarray, block_size: int = 1) -> Sequences:
        """``seq_lens``: [R], tokens of context and query together, of each request."""
        tails = np.where(self.canvas_widths > 0, self.tail_lens(block_size), 0)
        widths = self.canvas_widths + tails
        num_rows = len(widths)
        # [2 * R]: causal span, canvas, causal span, canvas, ... Empty causal spans and canvases are
        # dropped below.
        lens = np.stack([self.causal_lens - tails, widths], axis=1).reshape(-1)
        ends = np.stack([seq_lens - widths, seq_lens], axis=1).reshape(-1)
        request_of = np.repeat(np.arange(num_rows, dtype=np.int64), 2)
        is_causal = np.tile(np.array([1, 0], dtype=np.int32), num_rows)
        kept = lens > 0
        return Sequences(
            request_of=request_of[kept],
            query_start_loc=starts_of(lens[kept]).astype(np.int32),
            seq_lens=ends[kept].astype(np.int32),
            is_causal=is_causal[kept],
        )
