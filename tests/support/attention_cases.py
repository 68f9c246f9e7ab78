"""Batches for the attention tests: `CaseSpec` describes one, `make_case` makes its tensors.

What a kernel must not read is NaN: cache slots of no sequence, or behind a sequence's end, and
pages in front of a window. The output starts as NaN, so that rows that a kernel leaves out show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm.attention.inputs import AttentionOptions, PagedKV, RaggedBatch
from dllm.attention.masks import QuerySpan, anchor
from dllm.attention.reference import paged_attention

CAUSAL = 1 << 20  # more rows than any request has: all are causal
IMAGE = -1  # no row is causal, and no window is anchored to them


@dataclass(frozen=True)
class Window:
    """The window of a layer: its kind, symmetric or anchored, and its size in keys."""

    kind: str
    size: int


@dataclass(frozen=True)
class CaseSpec:
    """The sizes of a batch.

    spans: (query_len, context_len, causal rows) of each request. One with causal rows and others
    behind them is two sequences over the same pages.
    """

    spans: tuple[tuple[int, int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: Window | None = None
    logit_softcap: float = 0.0
    block_size: int = 1
    padding_tokens: int = 0
    padding_seqs: int = 0
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Case:
    """The tensors of a batch, and the right result.

    Attributes:
        spans: of the batch's sequences, without padding.
        expected: the output of each sequence, in fp32.
        magnitude: the output if all values (V) were positive, which bounds rounding errors.
    """

    query: Tensor
    cache: PagedKV
    batch: RaggedBatch
    options: AttentionOptions
    spans: list[QuerySpan]
    expected: list[Tensor]
    magnitude: list[Tensor]

    def poisoned_out(self) -> Tensor:
        return torch.full_like(self.query, float("nan"))


def sequences_of(
    query_len: int, context_len: int, num_causal: int, window: Window | None = None
) -> list[QuerySpan]:
    """The sequences of a request: its causal rows, then a canvas or an image."""
    head = min(max(num_causal, 0), query_len)
    spans = [QuerySpan(head, context_len + head, is_causal=True)] if head > 0 else []
    if head < query_len or query_len == 0:
        tail = QuerySpan(query_len - head, context_len + query_len, is_causal=False)
        if window is not None and window.kind == "anchored" and num_causal != IMAGE:
            tail = replace(tail, first_key=anchor(tail, window.size))
        spans.append(tail)
    return spans


def make_case(spec: CaseSpec) -> Case:
    """Random tensors for a batch, with NaN in every place that a kernel must not read."""
    generator = torch.Generator().manual_seed(spec.seed)
    requests = [sequences_of(*span, spec.window) for span in spec.spans]
    first = [_first_visible(spans[0], spec.window) for spans in requests]
    seq_lens = [spans[-1].seq_len for spans in requests]
    pages = [-(-seq_len // spec.page_size) for seq_len in seq_lens]
    max_pages = max([*pages, 1]) + 1
    num_pages = sum(pages) + 3
    order = torch.randperm(num_pages, generator=generator)
    tables = torch.full((len(requests) + 1, max_pages), -1, dtype=torch.int32)
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_size)
    key, value = torch.full(shape, float("nan")), torch.full(shape, float("nan"))

    used = 0
    for index, seq_len in enumerate(seq_lens):
        mine = order[used : used + pages[index]]
        used += pages[index]
        tables[index, : pages[index]] = mine.int()
        tables[index, : first[index] // spec.page_size] = -1  # freed by a sliding-window cache
        for pos in range(first[index], seq_len):
            where = (mine[pos // spec.page_size], pos % spec.page_size)
            key[where] = torch.randn(shape[2:], generator=generator)
            value[where] = torch.randn(shape[2:], generator=generator)

    request_of = [i for i, spans in enumerate(requests) for _ in spans]
    tables = tables[request_of + [-1] * spec.padding_seqs]  # the last one has no pages
    spans = [span for spans in requests for span in spans]
    cache, key_seen, value_seen = _store(key, value, spec)
    num_tokens = sum(span.query_len for span in spans) + spec.padding_tokens
    query = torch.randn(num_tokens, spec.num_heads, spec.head_size, generator=generator)
    query = query.to(spec.dtype).to(spec.device)
    window = spec.window and spec.window.size
    options = AttentionOptions(spec.head_size**-0.5, window, spec.logit_softcap, spec.block_size)
    reference_tables = tables.clamp(min=0).to(spec.device)
    expected, magnitude = (
        paged_attention(query, key_seen, values, reference_tables, spans, options)
        for values in (value_seen, value_seen.abs())
    )
    batch = make_batch(spans, tables, spec.padding_seqs, spec.device)
    return Case(query, cache, batch, options, spans, expected, magnitude)


def make_batch(
    spans: list[QuerySpan], tables: Tensor, padding_seqs: int = 0, device: str = "cpu"
) -> RaggedBatch:
    """The batch tensors of some sequences followed by ``padding_seqs`` sequences of length zero."""
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span.query_len)
    starts += [starts[-1]] * padding_seqs

    first_keys = [-1 if span.first_key is None else span.first_key for span in spans]
    has_first_keys = any(first_key >= 0 for first_key in first_keys)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return RaggedBatch(
        query_start_loc=int32(starts),
        seq_lens=int32([span.seq_len for span in spans] + [0] * padding_seqs),
        block_tables=tables.to(device),
        is_causal=int32([span.is_causal for span in spans] + [0] * padding_seqs),
        max_query_len=max([1, *(span.query_len for span in spans)]),
        first_keys=int32(first_keys + [-1] * padding_seqs) if has_first_keys else None,
    )


def _first_visible(span: QuerySpan, window: Window | None) -> int:
    if window is None:
        return 0
    return anchor(span, window.size)


def _store(key: Tensor, value: Tensor, spec: CaseSpec) -> tuple[PagedKV, Tensor, Tensor]:
    """The cache in its dtype, then its keys and values as a reader sees them, in fp32."""
    dtype = spec.cache_dtype or spec.dtype
    if dtype == spec.dtype:
        stored_key, stored_value = key.to(dtype).to(spec.device), value.to(dtype).to(spec.device)
        cache = PagedKV(stored_key, stored_value)
        return cache, stored_key.float(), stored_value.float()
    scales = [torch.tensor([s], dtype=torch.float32, device=spec.device) for s in (0.5, 0.25)]
    stored = [(x.to(spec.device) / s).to(dtype) for x, s in zip((key, value), scales, strict=True)]
    seen = [x.float() * s for x, s in zip(stored, scales, strict=True)]
    return PagedKV(stored[0], stored[1], scales[0], scales[1]), seen[0], seen[1]
