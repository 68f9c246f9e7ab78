"""The specification against pictures drawn by hand, and against Hugging Face's own masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from dllm.attention.masks import QuerySpan, anchor, may_attend, picture, visible_range

# (query_len, seq_len, is_causal, first key), window, block size, what it looks like
PICTURES = {
    "causal, no context": (
        (4, 4, True), None, 1,
        """
        x...
        xx..
        xxx.
        xxxx
        """,
    ),
    "causal after two keys": (
        (3, 5, True), None, 1,
        """
        xxx..
        xxxx.
        xxxxx
        """,
    ),
    "denoise": (
        (3, 5, False), None, 1,
        """
        xxxxx
        xxxxx
        xxxxx
        """,
    ),
    "causal, W = 3: two keys back and itself": (
        (3, 6, True), 3, 1,
        """
        .xxx..
        ..xxx.
        ...xxx
        """,
    ),
    "symmetric, W = 3: two keys to either side": (
        (4, 8, False), 3, 1,
        """
        ..xxxxx.
        ...xxxxx
        ....xxxx
        .....xxx
        """,
    ),
    "anchored, W = 3: two keys before the canvas, all of the canvas": (
        (4, 8, False, 2), 3, 1,
        """
        ..xxxxxx
        ..xxxxxx
        ..xxxxxx
        ..xxxxxx
        """,
    ),
    "W = 1, anchored: the canvas alone": (
        (2, 5, False, 3), 1, 1,
        """
        ...xx
        ...xx
        """,
    ),
    "W = 1, symmetric: itself alone": (
        (2, 5, False), 1, 1,
        """
        ...x.
        ....x
        """,
    ),
    "a drafter that shortens seq_len by two": (
        (4, 2, True), None, 1,
        """
        ..
        ..
        x.
        xx
        """,
    ),
    "a prompt of two blocks": (
        (4, 4, True), None, 2,
        """
        xx..
        xx..
        xxxx
        xxxx
        """,
    ),
    "a tail and its canvas": (
        (4, 8, False), None, 4,
        """
        xxxxxxxx
        xxxxxxxx
        xxxxxxxx
        xxxxxxxx
        """,
    ),
    "a chunk that starts and ends within a block": (
        (4, 7, True), None, 4,
        """
        xxxx...
        xxxxxxx
        xxxxxxx
        xxxxxxx
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    span, window, block_size, drawing = PICTURES[name]
    expected = "\n".join(line.strip() for line in drawing.strip().splitlines())
    assert picture(QuerySpan(*span), window, block_size) == expected


SPANS = st.builds(QuerySpan, st.integers(0, 12), st.integers(0, 30), st.booleans()) | st.builds(
    QuerySpan, st.integers(0, 12), st.integers(0, 30), st.just(False), st.integers(0, 35)
)
# (window, block size): no model has both.
SEEN = st.tuples(st.none() | st.integers(1, 35), st.just(1)) | st.tuples(
    st.none(), st.integers(1, 9)
)


@settings(max_examples=600)
@given(span=SPANS, seen=SEEN)
def test_the_range_is_the_predicate_in_closed_form(
    span: QuerySpan, seen: tuple[int | None, int]
) -> None:
    for row in range(span.query_len):
        start, stop = visible_range(row, span, *seen)
        assert 0 <= start <= stop <= span.seq_len
        keys = [key for key in range(-3, span.seq_len + 3) if may_attend(row, key, span, *seen)]
        assert keys == list(range(start, stop))


@settings(max_examples=100)
@given(query_len=st.integers(1, 12), context=st.integers(0, 40), size=st.integers(1, 60))
def test_the_kinds_agree_while_the_sequence_fits_into_the_window(
    query_len: int, context: int, size: int
) -> None:
    """They agree while context < W - canvas, and differ from there on."""
    span = QuerySpan(query_len, context + query_len, is_causal=False)
    anchored = replace(span, first_key=anchor(span, size))
    is_same = picture(span, size) == picture(anchored, size)
    if context < size - query_len:
        assert is_same
        assert picture(anchored, size) == picture(span)
    elif query_len > 1 and context >= size:
        assert not is_same


def test_refusals_name_the_values() -> None:
    with pytest.raises(ValueError, match="query_len is -1 and seq_len is 4"):
        QuerySpan(-1, 4, is_causal=False)
    with pytest.raises(ValueError, match="first_key is 2"):
        QuerySpan(1, 4, is_causal=True, first_key=2)
    with pytest.raises(IndexError, match=r"row is 3, the span has rows 0 \.\. 2"):
        may_attend(3, 0, QuerySpan(3, 4, is_causal=False))


@pytest.mark.parametrize("size", [1, 2, 5, 9, 40])
def test_hugging_face_mask_functions(size: int) -> None:
    """Causal; sliding causal with the same W; bidirectional, whose count is inclusive: W - 1."""
    seq_len, query_len = 20, 8
    causal = QuerySpan(query_len, seq_len, is_causal=True)
    denoise = QuerySpan(query_len, seq_len, is_causal=False)
    sliding = sliding_window_causal_mask_function(size)
    symmetric = sliding_window_bidirectional_mask_function(size - 1)
    for row in range(query_len):
        for key in range(seq_len):
            indices = (0, 0, torch.tensor(causal.position(row)), torch.tensor(key))
            assert may_attend(row, key, causal) == bool(causal_mask_function(*indices))
            assert may_attend(row, key, causal, size) == bool(sliding(*indices))
            assert may_attend(row, key, denoise, size) == bool(symmetric(*indices))


@pytest.mark.parametrize("num_context", [7, 15, 16, 17, 37])
def test_anchored_is_what_the_reference_model_sees(checkpoint: Any, num_context: int) -> None:
    """Measured on Hugging Face's DiffusionGemma with W = 16 and a canvas of 12.

    The first sliding layer's cache is compared with an untruncated one to learn which positions
    it kept; its attention weights tell which of these, and of the canvas, each row sees.
    """
    from tests.support.hf_reference import load_hf

    window, canvas = 16, 12
    model = load_hf(checkpoint(canvas_length=canvas, sliding_window=window))
    prompt = torch.randint(5, 100, (1, num_context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = DynamicCache(config=model.config.text_config)
        whole = DynamicCache()
        model.model.encoder(input_ids=prompt, past_key_values=cache)
        model.model.encoder(input_ids=prompt, past_key_values=whole)
        kept, all_keys = cache.layers[0].keys[0], whole.layers[0].keys[0]
        first_kept = num_context - kept.shape[1]
        torch.testing.assert_close(kept, all_keys[:, first_kept:])
        decoded = model.model.decoder(
            decoder_input_ids=torch.randint(5, 100, (1, canvas)),
            past_key_values=cache,
            output_attentions=True,
        )
    weights = decoded.attentions[0][0]
    assert weights.shape[1] == canvas
    assert weights.shape[2] == num_context - first_kept + canvas
    span = QuerySpan(canvas, num_context + canvas, is_causal=False)
    span = replace(span, first_key=anchor(span, window))
    for row in range(canvas):
        start, stop = visible_range(row, span, window)
        is_seen = (weights[:, row] > 0).all(dim=0)
        seen = (is_seen.nonzero().flatten() + first_kept).tolist()
        assert seen == list(range(start, stop))
