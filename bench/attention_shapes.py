"""The shapes of the attention benchmark, their tensors, and the least work each can take.

Layers of the 26B model (16 query heads): sliding layers have 8 KV heads of size 256 and W = 1024,
full layers 2 KV heads of size 512. The drafter is a Qwen3-8B-like block-diffusion drafter (32 query
heads, 8 KV heads of size 128, 16 rows). All sequences of a shape have the same lengths; what
differs inside a batch is the phase.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm.attention.inputs import AttentionOptions, PagedKV, RaggedBatch
from dllm.attention.masks import QuerySpan, Window, visible_range

CANVAS = 256


@dataclass(frozen=True)
class Layer:
    """Heads and window of one kind of layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: Window | None = None
    page_size: int = 64  # keys of a page


@dataclass(frozen=True)
class Shape:
    """One line of the table: ``context`` keys before ``query_len`` rows, ``batch`` times.

    splits: the split points, dealt out to the sequences in turn; its name is the phase.
    """

    layer: Layer
    phase: str
    batch: int
    context: int
    query_len: int
    splits: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.layer.name}/{self.phase}/b{self.batch}/c{self.context}"

    def spans(self) -> list[QuerySpan]:
        """The span of every sequence."""
        length = self.context + self.query_len
        return [
            QuerySpan(self.query_len, length, self.splits[i % len(self.splits)])
            for i in range(self.batch)
        ]

    def visible(self) -> list[list[tuple[int, int]]]:
        """First and last-plus-one visible key of every row of every sequence."""
        window = self.layer.window
        return [
            [visible_range(row, span, window) for row in range(span.query_len)]
            for span in self.spans()
        ]

    def visible_pairs(self) -> int:
        """(row, key) pairs that the mask lets through, over the whole batch, for one head."""
        return sum(stop - start for rows in self.visible() for start, stop in rows)

    def flops(self) -> int:
        """Floating-point operations of the two products over visible pairs only."""
        return 4 * self.layer.head_size * self.layer.num_heads * self.visible_pairs()

    def bytes(self) -> int:
        """Bytes that have to move: Q and the output, and every visible K and V once."""
        layer, size = self.layer, self.dtype.itemsize
        keys = sum(
            max(stop for _, stop in ranges) - min(start for start, _ in ranges)
            for ranges in self.visible()
        )
        rows = self.batch * self.query_len
        return 2 * size * layer.head_size * (rows * layer.num_heads + keys * layer.num_kv_heads)


SLIDING = Layer("sliding-anchored", 16, 8, 256, Window("anchored", 1024))
SYMMETRIC = replace(SLIDING, name="sliding-symmetric", window=Window("symmetric", 1024))
UNWINDOWED = replace(SLIDING, name="head256-full", window=None)
FULL = Layer("full", 16, 2, 512, page_size=128)  # vLLM: as many bytes as a sliding layer's
DRAFTER = Layer("drafter", 32, 8, 128, page_size=16)


def table() -> list[Shape]:
    """Every shape of the benchmark, the most telling ones first."""
    shapes: list[Shape] = []

    def add_steps(batch: int, contexts: tuple[int, ...]) -> None:
        for context in contexts:
            for layer in (FULL, SLIDING, SYMMETRIC, UNWINDOWED):
                shapes.append(Shape(layer, "denoise", batch, context, CANVAS, (0,)))
            shapes.append(Shape(DRAFTER, "draft", batch, context, 16, (0,)))

    add_steps(1, (65536, 1024, 8192, 131072))
    add_steps(8, (65536, 1024))
    for batch in (1, 8):
        for layer in (FULL, SLIDING):
            fused, mixed = (CANVAS,), (2 * CANVAS, 0, CANVAS)
            shapes.append(Shape(layer, "fused", batch, 8192, 2 * CANVAS, fused))
            shapes.append(Shape(layer, "mixed", batch, 8192, 2 * CANVAS, mixed))
            shapes.append(Shape(layer, "prefill", batch, 0, 4096, (4096,)))
            shapes.append(Shape(layer, "chunk", batch, 8192, 2048, (2048,)))
    add_steps(32, (1024, 65536))
    add_steps(8, (8192, 131072))
    add_steps(32, (8192, 131072))
    return shapes


def smoke_table() -> list[Shape]:
    """The same plumbing at sizes that Triton's interpreter gets through in seconds."""
    small = Layer("full", 4, 2, 32)
    window = replace(small, name="sliding-anchored", window=Window("anchored", 16))
    return [
        Shape(small, "denoise", 1, 48, 8, (0,), torch.float32),
        Shape(window, "mixed", 3, 24, 12, (12, 0, 5), torch.float32),
    ]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a shape."""

    query: Tensor
    cache: PagedKV
    batch: RaggedBatch
    options: AttentionOptions


def make_inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """Random tensors, pages in random order, keys and values beside each other as in vLLM."""
    torch.manual_seed(seed)
    layer, spans = shape.layer, shape.spans()
    pages_each = -(-(shape.context + shape.query_len) // layer.page_size)
    num_pages = shape.batch * pages_each
    order = torch.randperm(num_pages, device=device).int()
    cache_shape = (num_pages, layer.page_size, layer.num_kv_heads, 2 * layer.head_size)
    both = torch.empty(cache_shape, dtype=shape.dtype, device=device).normal_()
    num_tokens = shape.batch * shape.query_len
    query = torch.empty(
        num_tokens, layer.num_heads, layer.head_size, dtype=shape.dtype, device=device
    ).normal_()

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = RaggedBatch(
        query_start_loc=int32([i * shape.query_len for i in range(shape.batch + 1)]),
        seq_lens=int32([span.seq_len for span in spans]),
        block_tables=order.reshape(shape.batch, pages_each),
        bidirectional_from=int32([span.bidirectional_from for span in spans]),
        max_query_len=shape.query_len,
    )
    options = AttentionOptions(layer.head_size**-0.5, layer.window)
    return Inputs(query, PagedKV(*both.split(layer.head_size, dim=-1)), batch, options)
