"""The dense reference against torch's own attention, and its paged form against the dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dllm.attention.inputs import AttentionOptions
from dllm.attention.masks import ALL, Mask, QuerySpan
from dllm.attention.reference import dense_attention, dense_mask, paged_attention


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float = 0.3
) -> Tensor:
    """Torch's own: [rows, heads, size]."""
    heads_first = (part.transpose(0, 1)[None] for part in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


@pytest.mark.parametrize("values", [(7, 12, True), (7, 12, False)], ids=str)
@pytest.mark.parametrize("mask", [ALL, Mask(5), Mask(5, is_anchored=True)], ids=str)
def test_dense_attention_is_softmax_attention(values: tuple[Any, ...], mask: Mask) -> None:
    torch.manual_seed(0)
    span = QuerySpan(*values)
    query, key, value = torch.randn(7, 6, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    got = dense_attention(query, key, value, span, AttentionOptions(0.3, mask))
    expected = torch_attention(query, key, value, dense_mask(span, mask))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_head_of_blocks_is_block_causal_attention() -> None:
    torch.manual_seed(0)
    span = QuerySpan(8, 12, is_causal=True)
    query, key, value = torch.randn(8, 2, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    got = dense_attention(query, key, value, span, AttentionOptions(0.3, Mask(block_length=4)))
    block = torch.arange(12) // 4
    expected = torch_attention(query, key, value, block[None, :] <= block[4:, None])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_soft_cap_bounds_logits() -> None:
    """With a tiny cap all logits are nearly equal: the output is the mean of the values."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 1, 8) * 50, torch.randn(5, 1, 8) * 50, torch.randn(5, 1, 8)
    got = dense_attention(
        query, key, value, QuerySpan(2, 5, False), AttentionOptions(1.0, ALL, 1e-4)
    )
    torch.testing.assert_close(got, value.mean(0).expand(2, 1, 8), rtol=0, atol=1e-3)


def test_rows_that_see_nothing_are_zero() -> None:
    ones = torch.ones(3, 1, 4)
    query = torch.ones(4, 1, 4)
    got = dense_attention(query, ones, ones, QuerySpan(4, 3, True), AttentionOptions(1.0))
    assert (got[0] == 0).all()
    assert (got[1:] == 1).all()


def test_keys_that_no_row_sees_do_not_matter() -> None:
    key, value = torch.ones(5, 1, 4), torch.ones(5, 1, 4)
    key[:2] = value[:2] = float("nan")
    options = AttentionOptions(1.0, Mask(2))
    got = dense_attention(torch.ones(2, 1, 4), key, value, QuerySpan(2, 5, True), options)
    assert (got == 1).all()


@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_pages_hold_the_keys_in_order(page_size: int) -> None:
    """Two sequences in scattered pages, the rest of the cache NaN, equal the dense reference."""
    torch.manual_seed(0)
    spans = [QuerySpan(5, 25, True), QuerySpan(9, 40, False)]
    pages = [-(-span.seq_len // page_size) for span in spans]
    scattered = torch.randperm(sum(pages) + 2)[: sum(pages)].split(pages)
    tables = torch.nn.utils.rnn.pad_sequence(scattered, batch_first=True, padding_value=-1).int()
    caches = torch.full((2, sum(pages) + 2, page_size, 2, 8), float("nan"))
    contents = [torch.randn(2, span.seq_len, 2, 8) for span in spans]
    for mine, content in zip(scattered, contents, strict=True):
        for pos in range(content.shape[1]):
            caches[:, mine[pos // page_size], pos % page_size] = content[:, pos]
    query = torch.randn(14, 4, 8)
    options = AttentionOptions(0.4, Mask(9, is_anchored=True))
    got = paged_attention(query, caches[0], caches[1], tables, spans, options)
    for rows, (key, value), span, output in zip(
        query.split([5, 9]), contents, spans, got, strict=True
    ):
        assert torch.equal(output, dense_attention(rows, key, value, span, options))
