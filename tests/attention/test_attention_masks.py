"""The specification against pictures drawn by hand, and against Hugging Face's own masks."""

from __future__ import annotations

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

from dllm.attention.masks import ALL, Mask, QuerySpan, may_attend, visible_range

# (query_len, seq_len, is_causal, is_image), the mask, what it looks like
PICTURES = {
    "causal, no context": (
        (4, 4, True), ALL,
        """
        x...
        xx..
        xxx.
        xxxx
        """,
    ),
    "causal after two keys": (
        (3, 5, True), ALL,
        """
        xxx..
        xxxx.
        xxxxx
        """,
    ),
    "denoise": (
        (3, 5, False), ALL,
        """
        xxxxx
        xxxxx
        xxxxx
        """,
    ),
    "causal, W = 3: two keys back and itself": (
        (3, 6, True), Mask(3),
        """
        .xxx..
        ..xxx.
        ...xxx
        """,
    ),
    "symmetric, W = 3: two keys to either side": (
        (4, 8, False), Mask(3),
        """
        ..xxxxx.
        ...xxxxx
        ....xxxx
        .....xxx
        """,
    ),
    "anchored, W = 3: two keys before the canvas, all of the canvas": (
        (4, 8, False), Mask(3, is_anchored=True),
        """
        ..xxxxxx
        ..xxxxxx
        ..xxxxxx
        ..xxxxxx
        """,
    ),
    "an image in an anchored layer, W = 3: the symmetric window": (
        (3, 6, False, True), Mask(3, is_anchored=True),
        """
        .xxxxx
        ..xxxx
        ...xxx
        """,
    ),
    "W = 1, anchored: the canvas alone": (
        (2, 5, False), Mask(1, is_anchored=True),
        """
        ...xx
        ...xx
        """,
    ),
    "W = 1, symmetric: itself alone": (
        (2, 5, False), Mask(1),
        """
        ...x.
        ....x
        """,
    ),
    "a drafter that shortens seq_len by two": (
        (4, 2, True), ALL,
        """
        ..
        ..
        x.
        xx
        """,
    ),
    "a prompt of two blocks": (
        (4, 4, True), Mask(block_length=2),
        """
        xx..
        xx..
        xxxx
        xxxx
        """,
    ),
    "a tail and its canvas": (
        (4, 8, False), Mask(block_length=4),
        """
        xxxxxxxx
        xxxxxxxx
        xxxxxxxx
        xxxxxxxx
        """,
    ),
    "a chunk that starts and ends within a block": (
        (4, 7, True), Mask(block_length=4),
        """
        xxxx...
        xxxxxxx
        xxxxxxx
        xxxxxxx
        """,
    ),
}  # fmt: skip


def picture(span: QuerySpan, mask: Mask = ALL) -> str:
    """A line for each row, in it an 'x' for each key that it sees."""
    return "\n".join(
        "".join("x" if may_attend(row, key, span, mask) else "." for key in range(span.seq_len))
        for row in range(span.query_len)
    )


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    span, mask, drawing = PICTURES[name]
    expected = "\n".join(line.strip() for line in drawing.strip().splitlines())
    assert picture(QuerySpan(*span), mask) == expected


LENGTHS = st.integers(0, 12), st.integers(0, 30)
SPANS = st.builds(QuerySpan, *LENGTHS, st.booleans()) | st.builds(
    QuerySpan, *LENGTHS, st.just(False), st.booleans()
)
SOME_MASKS = st.builds(Mask, st.integers(1, 35), st.booleans()) | st.builds(
    Mask, block_length=st.integers(1, 9)
)


@settings(max_examples=600)
@given(span=SPANS, mask=SOME_MASKS)
def test_the_range_is_the_predicate_in_closed_form(span: QuerySpan, mask: Mask) -> None:
    for row in range(span.query_len):
        start, stop = visible_range(row, span, mask)
        assert 0 <= start <= stop <= span.seq_len
        keys = [key for key in range(-3, span.seq_len + 3) if may_attend(row, key, span, mask)]
        assert keys == list(range(start, stop))


@settings(max_examples=100)
@given(query_len=st.integers(1, 12), context=st.integers(0, 40), size=st.integers(1, 60))
def test_the_kinds_agree_while_the_sequence_fits_into_the_window(
    query_len: int, context: int, size: int
) -> None:
    """They agree while context < W - canvas, and differ from there on."""
    span = QuerySpan(query_len, context + query_len, is_causal=False)
    anchored = picture(span, Mask(size, is_anchored=True))
    is_same = picture(span, Mask(size)) == anchored
    if context < size - query_len:
        assert is_same
        assert anchored == picture(span)
    elif query_len > 1 and context >= size:
        assert not is_same


def test_dllm_doctor_tells_masks_apart() -> None:
    masks = Mask(), Mask(3), Mask(3, is_anchored=True), Mask(block_length=2)
    assert [*map(str, masks)] == ["unbounded", "symmetric", "anchored", "blocks"]


def test_refusals_name_the_values() -> None:
    with pytest.raises(ValueError, match="query_len is -1 and seq_len is 4"):
        QuerySpan(-1, 4, is_causal=False)
    with pytest.raises(ValueError, match="is_image and is_causal"):
        QuerySpan(1, 4, is_causal=True, is_image=True)
    with pytest.raises(ValueError, match="only layers with a window"):
        Mask(is_anchored=True)
    with pytest.raises(ValueError, match="block_length is 4 and window 8: only one"):
        Mask(8, block_length=4)
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
            assert may_attend(row, key, causal, Mask(size)) == bool(sliding(*indices))
            assert may_attend(row, key, denoise, Mask(size)) == bool(symmetric(*indices))


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
    for row in range(canvas):
        start, stop = visible_range(row, span, Mask(window, is_anchored=True))
        is_seen = (weights[:, row] > 0).all(dim=0)
        seen = (is_seen.nonzero().flatten() + first_kept).tolist()
        assert seen == list(range(start, stop))
