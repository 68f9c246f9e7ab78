"""Heads and canvases read off the schedule, and the sequences made of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm.engine.spans import Spans


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def spans_of(*rows: tuple[int, int]) -> Spans:
    """Spans of rows of (query length, canvas tokens)."""
    return Spans.of_schedule(int32(*(q for q, _ in rows)), int32(*(c for _, c in rows)))


def test_a_canvas_longer_than_what_is_scheduled_is_refused_with_its_values():
    with pytest.raises(AssertionError, match="canvas longer than what is scheduled"):
        spans_of((32, 32), (16, 32))


ROWS = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 200)).filter(
        lambda row: row[0] + row[1] > 0
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_sequences_partition_the_tokens_of_a_batch(rows):
    """Every token belongs to one sequence, at the position and under the mask of its row."""
    causal, widths, contexts = (np.array(column) for column in zip(*rows, strict=True))
    seq_lens = contexts + causal + widths
    sequences = Spans.of_schedule(causal + widths, widths).sequences(seq_lens)
    starts = sequences.query_start_loc
    lens = np.diff(starts)
    assert starts[0] == 0 and (lens > 0).all()

    tokens = []  # (row, position, whether causal), in the order of the flat token axis
    for row, length, end, causal in zip(
        sequences.request_of, lens, sequences.seq_lens, sequences.is_causal, strict=True
    ):
        tokens += [(row, end - length + i, causal) for i in range(length)]
    expected = [
        (row, context + i, int(i < causal))
        for row, (causal, width, context) in enumerate(rows)
        for i in range(causal + width)
    ]
    assert tokens == expected
    # A canvas sees its whole sequence.
    canvases = sequences.is_causal == 0
    assert (sequences.seq_lens[canvases] == seq_lens[sequences.request_of[canvases]]).all()


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.booleans()), min_size=1, max_size=4
    ),
    block_size=st.integers(2, 7),
)
def test_with_blocks_every_token_sees_its_own_block(rows, block_size):
    """rows: blocks computed before, causal tokens, whether a canvas fills the last block."""
    spans, starts = [], []
    for blocks, causal, has_canvas in rows:
        start = blocks * block_size
        canvas = block_size - (start + causal) % block_size if has_canvas or causal == 0 else 0
        spans.append((causal + canvas, canvas))
        starts.append(start)
    lens = [query_len for query_len, _ in spans]
    seq_lens = int32(*(start + n for start, n in zip(starts, lens, strict=True)))
    sequences = spans_of(*spans).sequences(seq_lens, block_size)
    places = []  # (row, position, last key that it sees) of every token
    lengths = np.diff(sequences.query_start_loc)
    for row, length, end, causal in zip(
        sequences.request_of, lengths, sequences.seq_lens, sequences.is_causal, strict=True
    ):
        for position in range(end - length, end):
            block_end = (position // block_size + 1) * block_size if causal else end
            places.append((row, position, min(block_end, end)))
    assert places == [
        (row, position, min((position // block_size + 1) * block_size, seq_lens[row]))
        for row, start in enumerate(starts)
        for position in range(start, start + lens[row])
    ]


def test_the_tail_of_a_head_is_what_shares_a_block_with_the_canvas():
    # a prompt with its first canvas, an emitted block with the next canvas, a whole canvas, a chunk
    spans = spans_of((96, 3), (64, 32), (32, 32), (37, 0))
    assert spans.tail_lens(32).tolist() == [29, 0, 0, 5]
    assert spans.tail_lens(1).tolist() == [0, 0, 0, 0]
