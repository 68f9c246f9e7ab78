"""Batches that attention kernels are checked with: `make_case` makes their tensors and the result.

What a kernel must not read is NaN: cache slots of no sequence, or behind a sequence's end. Pages in
front of a window are freed: their number is -1. The output starts as NaN, so that rows that a
kernel leaves out show.

Tolerances, element by element. Let u be the unit roundoff of the query's dtype (2^-8 for bf16,
2^-11 for fp16) and a = sum(p |v|), which the reference computes too. The kernel rounds two things:
every probability, which moves the output by at most u a, and the output o itself, by at most u |o|.
Everything else is fp32: logits of N(0, 1) inputs are off by a few 1e-6, and so are the
probabilities, relatively. fp8 adds nothing: its numbers are exact in bf16 and fp16, and scales are
applied in fp32. Hence u (a + |o|) + 2e-5 a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.attention.inputs import AttentionOptions, Layer, PagedKV, RaggedBatch
from dllm.attention.masks import ALL, Mask, QuerySpan
from dllm.attention.reference import paged_attention

CAUSAL = 1 << 20  # more rows than any request has: all are causal
IMAGE = -1  # no row is causal, and no window is anchored to them
SCALES = (0.5, 0.25)  # of keys and values in an FP8 cache; powers of two, so that none is rounded


class Wrong(Exception):
    """A kernel computes something else than its definition; the message says how much."""


def within(difference: Tensor, bound: Tensor | float, what: str = "") -> None:
    """Raises Wrong where a difference is larger than its bound, or NaN."""
    excess = (difference.abs() - bound).nan_to_num(nan=torch.inf)
    if (excess > 0).any():
        largest = difference.abs().nan_to_num(nan=torch.inf).max()
        raise Wrong(f"{what}off by up to {largest:.2g}")


@dataclass(frozen=True)
class Case:
    """The tensors of a batch, and the right result."""

    query: Tensor
    cache: PagedKV
    batch: RaggedBatch
    options: AttentionOptions
    spans: list[QuerySpan]  # of the batch's sequences, without padding
    expected: list[Tensor]  # the output of each sequence, in fp32
    # the output if all values (V) were positive, which bounds rounding errors
    magnitude: list[Tensor]

    def poisoned_out(self) -> Tensor:
        return torch.full_like(self.query, torch.nan)

    def check(self, out: Tensor, roundoff: float) -> None:
        """Raises Wrong where a row is off by more than the tolerance, or padding is written."""
        start = 0
        for span, expected, magnitude in zip(
            self.spans, self.expected, self.magnitude, strict=True
        ):
            rows = out[start : start + span.query_len].float()
            if span.seq_len > 0:
                bound = roundoff * (magnitude + expected.abs()) + 2e-5 * magnitude
                within(rows - expected, bound, f"{span}: ")
            elif not rows.isnan().all():
                raise Wrong(f"{span}: written without a key")
            start += span.query_len
        if not out[start:].isnan().all():
            raise Wrong("padding tokens were written")


def sequences_of(query_len: int, context_len: int, num_causal: int) -> list[QuerySpan]:
    """Of a request: its causal rows, then a canvas or an image."""
    head = min(max(num_causal, 0), query_len)
    spans = [QuerySpan(head, context_len + head, is_causal=True)] if head > 0 else []
    if head < query_len or query_len == 0:
        is_image = num_causal == IMAGE
        spans.append(QuerySpan(query_len - head, context_len + query_len, False, is_image))
    return spans


def make_case(
    layer: Layer,
    spans: Sequence[tuple[int, int, int]],
    logit_softcap: float = 0.0,
    padding_tokens: int = 0,
    padding_seqs: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Case:
    """spans: (query_len, context_len, causal rows) of each request. One with causal rows and others
    behind them is two sequences over the same pages.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = [sequences_of(*span) for span in spans]
    seq_lens = [each[-1].seq_len for each in requests]
    counts = [-(-seq_len // layer.page_size) for seq_len in seq_lens]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    tables = torch.full((len(requests) + 1, max([*counts, 1]) + 1), -1, dtype=torch.int32)
    shape = len(order), layer.page_size, layer.num_kv_heads, layer.head_size
    both = torch.full((2, *shape), torch.nan)
    for index, pages in enumerate(order[: sum(counts)].split(counts)):
        first = _first_visible(requests[index][0], layer.mask)
        pos = torch.arange(first, seq_lens[index])
        places = pages[pos // layer.page_size], pos % layer.page_size
        both[:, *places] = torch.randn(2, len(pos), *shape[2:], generator=generator)
        freed = first // layer.page_size
        tables[index, freed : len(pages)] = pages[freed:].int()

    request_of = [index for index, each in enumerate(requests) for _ in each]
    tables = tables[request_of + [-1] * padding_seqs]  # the last one has no pages
    sequences = [span for each in requests for span in each]
    cache, key, value = _store(both.to(device), layer)
    num_tokens = sum(span.query_len for span in sequences) + padding_tokens
    query = torch.randn(num_tokens, layer.num_heads, layer.head_size, generator=generator)
    query = query.to(layer.dtype).to(device)
    options = AttentionOptions(layer.head_size**-0.5, layer.mask, logit_softcap)
    pages_of = tables.clamp(min=0).to(device)
    expected, magnitude = (
        paged_attention(query, key, values, pages_of, sequences, options)
        for values in (value, value.abs())
    )
    batch = make_batch(sequences, tables, layer.mask, padding_seqs, device)
    return Case(query, cache, batch, options, sequences, expected, magnitude)


def make_batch(
    spans: Sequence[QuerySpan],
    tables: Tensor,
    mask: Mask = ALL,
    padding_seqs: int = 0,
    device: torch.device | str = "cpu",
) -> RaggedBatch:
    def ints(values: Sequence[int], padding: int) -> Tensor:
        padded = [*values, *[padding] * padding_seqs]
        return torch.tensor(padded, dtype=torch.int32, device=device)

    lens = [span.query_len for span in spans]
    starts = [sum(lens[:index]) for index in range(len(lens) + 1)]
    first_keys = [-1 if (key := mask.first_key(span)) is None else key for span in spans]
    return RaggedBatch(
        query_start_loc=ints(starts, starts[-1]),
        seq_lens=ints([span.seq_len for span in spans], 0),
        block_tables=tables.to(device),
        is_causal=ints([span.is_causal for span in spans], 0),
        max_query_len=max([1, *lens]),
        first_keys=ints(first_keys, -1) if mask.is_anchored else None,
    )


def _first_visible(span: QuerySpan, mask: Mask) -> int:
    return 0 if mask.window is None else max(span.start - (mask.window - 1), 0)


def _store(both: Tensor, layer: Layer) -> tuple[PagedKV, Tensor, Tensor]:
    """The cache in its dtype, then its keys and values as a reader sees them, in fp32."""
    dtype = layer.cache_dtype
    if dtype is None:
        key, value = both.to(layer.dtype)
        return PagedKV(key, value), key.float(), value.float()
    scales = [torch.tensor([scale], device=both.device) for scale in SCALES]
    stored = [(each / scale).to(dtype) for each, scale in zip(both, scales, strict=True)]
    key, value = (each.float() * scale for each, scale in zip(stored, scales, strict=True))
    return PagedKV(*stored, *scales), key, value
