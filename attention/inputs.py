"""The tensors of one attention call, grouped, and the checks that refuse inconsistent ones.

Index spaces: a *token* indexes the flat query axis of the batch, a *row* the query rows of one
sequence, a *position* the keys of one sequence, a *page* the cache, a *slot* one key in a page.

`PagedKV` and `RaggedBatch` check themselves: a cache once at start, a batch once a step. A layer
calls `check_inputs` once, because no shape or dtype changes later. Values, as the ids of pages, are
not checked: that would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm.attention.masks import ALL, Mask

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# vLLM's names of FP8 cache dtypes.
FP8_OF = {"fp8": FP8_DTYPES[0], "fp8_e4m3": FP8_DTYPES[0], "fp8_e5m2": FP8_DTYPES[1]}
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 16, 512


@dataclass(frozen=True)
class AttentionOptions:
    """What one layer computes; with a logit_softcap logits s become cap * tanh(s / cap)."""

    scale: float
    mask: Mask = ALL
    logit_softcap: float = 0.0


@dataclass(frozen=True)
class Layer:
    """An attention layer of a model on one GPU.

    cache_dtype: of stored keys and values; None: ``dtype``. page_size: keys of a page.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    mask: Mask = ALL
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    page_size: int = 16


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache. Raises ValueError for tensors that do not fit together, with both values.

    key, value ``[num_pages, page_size, num_kv_heads, head_size]``, in the query's dtype or fp8, the
    elements of a head side by side. k_scale, v_scale: one fp32 element each, by which stored fp8
    numbers are multiplied when they are read; None means 1.
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        key = self.key
        if key.dim() != 4 or not MIN_HEAD_SIZE <= key.shape[3] <= MAX_HEAD_SIZE:
            raise ValueError(
                f"key cache is {list(key.shape)}, expected [num_pages, page_size, num_kv_heads, "
                f"head_size] with a head size of {MIN_HEAD_SIZE} .. {MAX_HEAD_SIZE}"
            )
        for name, tensor in (("key cache", key), ("value cache", self.value)):
            expect(name, tensor, key.shape, [key.dtype], key.device)
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is not None:
                expect(name, scale.reshape(-1), (1,), [torch.float32], key.device)

    @property
    def page_size(self) -> int:
        return self.key.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.key.dtype in FP8_DTYPES

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """Of queries and new keys."""
        return QUERY_DTYPES if self.is_fp8 else [self.key.dtype]


@dataclass(frozen=True)
class ContextWeights:
    """What turns hidden states of a drafter's context into keys and values: L layers, H KV heads.

    weight ``[L * 2 * H * head_size, hidden]``: for each layer its key heads, then its value heads.
    bias: the same rows, or None. k_norm ``[L, head_size]``, of the keys' RMSNorm; eps: added to the
    mean square. cos_sin ``[positions, rotary_size]``: cosines, then sines; dimensions of a head
    beyond rotary_size are not turned. is_neox: RoPE turns halves, otherwise neighbours.
    weight, bias and k_norm have one dtype: fp16, bf16 or fp32.
    """

    weight: Tensor
    bias: Tensor | None
    k_norm: Tensor
    eps: float
    cos_sin: Tensor
    is_neox: bool

    MAX_HEAD_SIZE: ClassVar[int] = 256  # a larger product of one head does not fit into registers


@dataclass(frozen=True)
class RaggedBatch:
    """The sequences of a step (`masks.py`), on one device. Raises as ``PagedKV``.

    query_start_loc ``[num_seqs + 1]`` int32: the query rows of sequence i are tokens
    [query_start_loc[i], query_start_loc[i + 1]); tokens from query_start_loc[-1] on are padding.
    seq_lens ``[num_seqs]`` int32: keys in the cache, those of the query rows included; 0 marks a
    padded sequence, for which nothing is written.
    block_tables ``[num_seqs, max_pages]`` int32: the pages of each sequence, in order. Sequences of
    one request have the same. Entries of pages that no row sees are never read.
    is_causal ``[num_seqs]`` int32: 1 where all rows are causal, 0 where all are bidirectional.
    first_keys ``[num_seqs]`` int32: `Mask.first_key` of each sequence; -1 where the window decides.
    None: all -1.
    max_query_len: an upper bound on query rows, known to the host. It decides the tile height,
    and with it how sums are rounded: a sequence gives the same bits in any batch with this bound.
    max_seq_len: an upper bound on seq_lens, known to the host; None means what the tables can hold.
    max_ahead: no row sees keys more positions ahead of it, known to the host; None: any.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    is_causal: Tensor
    max_query_len: int
    first_keys: Tensor | None = None
    max_seq_len: int | None = None
    max_ahead: int | None = None

    def __post_init__(self) -> None:
        num_seqs, tables = self.num_seqs, self.block_tables
        expect("block_tables", tables, (num_seqs, None), [torch.int32])
        for name, length in (
            ("query_start_loc", num_seqs + 1),
            ("seq_lens", num_seqs),
            ("is_causal", num_seqs),
            ("first_keys", num_seqs),
        ):
            if (tensor := getattr(self, name)) is not None:
                expect(name, tensor, (length,), [torch.int32], tables.device)
        if self.max_query_len < 1:
            raise ValueError(f"max_query_len is {self.max_query_len}, it must be at least 1")

    @property
    def num_seqs(self) -> int:
        """Padded ones included."""
        return self.seq_lens.shape[0]


def expect(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raises ValueError for another tensor, or one whose last axis has gaps.

    shape: None stands for any length. device: None allows any.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == length
        for wanted, length in zip(shape, tensor.shape, strict=True)
    )
    is_elsewhere = device is not None and tensor.device != device
    has_gaps = tensor.dim() > 0 and tensor.stride(-1) != 1
    if not fits or tensor.dtype not in dtypes or is_elsewhere or has_gaps:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
            f"{tensor.stride()}, expected {list(shape)} of {list(dtypes)} on "
            f"{device or 'any device'} with a last stride of 1"
        )


def check_inputs(query: Tensor, cache: PagedKV, batch: RaggedBatch, out: Tensor) -> None:
    """Raises ValueError for a query that does not fit the others; reads no data.

    query and out ``[num_tokens, num_heads, head_size]``.
    """
    device, num_kv_heads = cache.key.device, cache.key.shape[2]
    expect("query", query, (None, None, cache.key.shape[3]), cache.dtypes, device)
    expect("out", out, query.shape, [query.dtype], device)
    expect("seq_lens", batch.seq_lens, (None,), [torch.int32], device)
    if num_kv_heads == 0 or query.shape[1] % num_kv_heads != 0:
        raise ValueError(
            f"{query.shape[1]} query heads are not a multiple of {num_kv_heads} KV heads"
        )
