"""The tensors of one attention call, grouped, and the checks that refuse inconsistent ones.

Index spaces: a *token* indexes the flat query axis of the batch, a *row* the query span of one
sequence, a *position* the keys of one sequence, a *page* the cache, a *slot* one key in a page.

Shapes, dtypes and devices are checked on every call, without reading device data. Values (is a
page id in range?) can only be checked by waiting for the device. `check_values` does that. It runs
on every call with CPU tensors; on a GPU, call it yourself when you debug.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.attention.masks import Window

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 16, 512


@dataclass(frozen=True)
class AttentionOptions:
    """What one layer computes: softmax scale, window and logit soft cap.

    scale: multiplies every logit. window: None lets every row see the whole sequence.
    logit_softcap: logits s become cap * tanh(s / cap); 0 leaves them as they are.
    block_size: positions of a block, which head rows see as a whole (`masks.py`); 1: causal.
    Raises ValueError for a scale that is not finite and positive, a negative soft cap, a block size
    below 1, and blocks together with a window.
    """

    scale: float
    window: Window | None = None
    logit_softcap: float = 0.0
    block_size: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}, it must be finite and above 0")
        if not (math.isfinite(self.logit_softcap) and self.logit_softcap >= 0):
            raise ValueError(f"logit_softcap is {self.logit_softcap}, it must be 0 (none) or above")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, it must be 1 (causal) or above")
        if self.block_size > 1 and self.window is not None:
            raise ValueError(
                f"block_size is {self.block_size} beside {self.window}: only one of them"
            )


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache.

    key, value ``[num_pages, page_size, num_kv_heads, head_size]``, in the query's dtype or fp8. Any
    strides; a last stride of 1 is the fast case. k_scale, v_scale: one fp32 element on the same
    device by which stored fp8 numbers are multiplied when they are read; None means 1.
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        """Keys in a page."""
        return self.key.shape[1]


@dataclass(frozen=True)
class RaggedBatch:
    """Which tokens belong to which sequence and what every row may see. All tensors on one device.

    query_start_loc ``[num_seqs + 1]`` int32: the query span of sequence i is tokens
    [query_start_loc[i], query_start_loc[i + 1]); tokens from query_start_loc[-1] on are padding.
    seq_lens ``[num_seqs]`` int32: keys in the cache, the span included; 0 marks a padded sequence,
    for which nothing is written.
    block_tables ``[num_seqs, max_pages]`` int32: the pages of each sequence, in order. Entries of
    pages that no row sees are never read.
    bidirectional_from ``[num_seqs]``: int32, the row of the span at which rows stop being causal;
    negative for an image, whose rows all see each other and have the symmetric window.
    A bool tensor is accepted too: True makes all rows causal, False none.
    max_query_len: an upper bound on span lengths, known to the host. It decides the tile height,
    and with it how sums are rounded: a sequence gives the same bits in any batch with this bound.
    max_seq_len: an upper bound on seq_lens, known to the host; None means what the tables can hold.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    bidirectional_from: Tensor
    max_query_len: int
    max_seq_len: int | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch, padded ones included."""
        return self.seq_lens.shape[0]


def check_inputs(query: Tensor, cache: PagedKV, batch: RaggedBatch, out: Tensor) -> None:
    """Refuse shapes, dtypes and devices that do not fit together, naming both sides.

    query and out ``[num_tokens, num_heads, head_size]``. Reads no data of a GPU; on a CPU, where
    that costs no waiting, `check_values` runs too. Raises ValueError.
    """
    _check_shapes(query, cache, out)
    _check_dtypes(query, cache, out)
    _check_batch(batch)
    tensors = {
        "out": out, "key": cache.key, "value": cache.value, "k_scale": cache.k_scale,
        "v_scale": cache.v_scale, "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens, "block_tables": batch.block_tables,
        "bidirectional_from": batch.bidirectional_from,
    }  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query is on {query.device}")
    if query.device.type == "cpu":
        check_values(cache, batch, num_tokens=query.shape[0])


def _check_shapes(query: Tensor, cache: PagedKV, out: Tensor) -> None:
    if query.dim() != 3:
        raise ValueError(f"query is {_shape(query)}, expected [num_tokens, num_heads, head_size]")
    if out.shape != query.shape:
        raise ValueError(f"out is {_shape(out)}, query is {_shape(query)}: they must be equal")
    if cache.key.dim() != 4:
        raise ValueError(
            f"key cache is {_shape(cache.key)}, "
            "expected [num_pages, page_size, num_kv_heads, head_size]"
        )
    if cache.value.shape != cache.key.shape:
        raise ValueError(
            f"value cache is {_shape(cache.value)}, key cache is {_shape(cache.key)}: "
            "they must be equal"
        )
    _, num_heads, head_size = query.shape
    num_kv_heads = cache.key.shape[2]
    if cache.key.shape[3] != head_size:
        raise ValueError(f"head size of the cache is {cache.key.shape[3]}, of query {head_size}")
    if not MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"head size is {head_size}, allowed {MIN_HEAD_SIZE} .. {MAX_HEAD_SIZE}")
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride(2) != 1:
            raise ValueError(f"last stride of {name} is {tensor.stride(2)}, expected 1")


def _check_dtypes(query: Tensor, cache: PagedKV, out: Tensor) -> None:
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(f"query is {query.dtype}, allowed are {QUERY_DTYPES}")
    if out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype}, query is {query.dtype}: they must be equal")
    if cache.value.dtype != cache.key.dtype:
        raise ValueError(f"value cache is {cache.value.dtype}, key cache is {cache.key.dtype}")
    if cache.key.dtype != query.dtype and cache.key.dtype not in FP8_DTYPES:
        raise ValueError(
            f"cache is {cache.key.dtype}, query is {query.dtype}: "
            f"the cache must have the query's dtype or one of {FP8_DTYPES}"
        )
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise ValueError(f"{name} is {_shape(scale)} {scale.dtype}, expected one fp32 element")


def _check_batch(batch: RaggedBatch) -> None:
    num_seqs = batch.num_seqs
    expected = {
        "query_start_loc": (batch.query_start_loc, (num_seqs + 1,), (torch.int32,)),
        "seq_lens": (batch.seq_lens, (num_seqs,), (torch.int32,)),
        "bidirectional_from": (batch.bidirectional_from, (num_seqs,), (torch.int32, torch.bool)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {_shape(tensor)}, expected {list(shape)}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}, expected one of {dtypes}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has stride {tensor.stride()}, expected a contiguous tensor")
    tables = batch.block_tables
    if tables.dim() != 2 or tables.shape[0] != num_seqs:
        raise ValueError(f"block_tables is {_shape(tables)}, expected [{num_seqs}, max_pages]")
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(
            f"block_tables is {tables.dtype} with stride {tables.stride()}, "
            "expected int32 with last stride 1"
        )
    if batch.max_query_len < 1:
        raise ValueError(f"max_query_len is {batch.max_query_len}, it must be at least 1")


def check_values(cache: PagedKV, batch: RaggedBatch, num_tokens: int) -> None:
    """Refuse lengths and page ids that are too large for the tensors. Waits for the device.

    Negative page ids pass: they stand for pages that no row sees. Raises ValueError, with the
    sequence and the value.
    """
    loc = batch.query_start_loc.tolist()
    capacity = batch.block_tables.shape[1] * cache.page_size
    limit = capacity if batch.max_seq_len is None else min(batch.max_seq_len, capacity)
    if loc[0] != 0 or loc[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc runs {loc[0]} .. {loc[-1]}, query has {num_tokens} tokens"
        )
    for index, seq_len in enumerate(batch.seq_lens.tolist()):
        query_len = loc[index + 1] - loc[index]
        if not 0 <= query_len <= batch.max_query_len:
            raise ValueError(
                f"sequence {index} has {query_len} rows, max_query_len is {batch.max_query_len}"
            )
        if not 0 <= seq_len <= limit:
            raise ValueError(f"sequence {index} has seq_len {seq_len}, the limit is {limit}")
        pages = batch.block_tables[index, : -(-seq_len // cache.page_size)]
        if pages.numel() and int(pages.max()) >= cache.key.shape[0]:
            raise ValueError(
                f"sequence {index} has page {int(pages.max())}, the cache has "
                f"{cache.key.shape[0]} pages"
            )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
