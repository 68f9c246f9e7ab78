"""What the attention kernel is compared with. Each peer prepares once and is timed on the call.

A peer's `prepare(shape, inputs)` returns a function that runs it once and returns the output
``[num_tokens, num_heads, head_size]``, or raises `CannotExpressError` with the reason. Peers that
need contiguous K and V get them gathered beforehand, for free.

    sdpa          torch.nn.functional.scaled_dot_product_attention with a dense mask
    vllm_unified  vLLM's unified Triton attention; fused spans as virtual sequences; it has no
                  anchored window and runs the symmetric one, less work, checked against that
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention.masks import QuerySpan, Window, visible_range
from attention.reference import gather_pages
from bench.attention_shapes import Inputs, Shape

Run = Callable[[], Tensor]


class CannotExpressError(Exception):
    """This peer cannot compute this shape, or is not installed; the message says why."""


def compared_window(name: str, shape: Shape) -> Window | None:
    """The window a peer really computes, which its output is checked against."""
    window = shape.layer.window
    if name == "vllm_unified" and window is not None:
        return Window("symmetric", window.size)
    return window


def _contiguous(shape: Shape, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Q ``[batch, heads, rows, size]``, K and V ``[batch, kv_heads, keys, size]``."""
    seq_len, layer = shape.context + shape.query_len, shape.layer
    query = inputs.query.view(shape.batch, shape.query_len, layer.num_heads, layer.head_size)

    def gather(cache: Tensor) -> Tensor:
        pages = [gather_pages(cache, table, seq_len) for table in inputs.batch.block_tables]
        return torch.stack(pages).transpose(1, 2).contiguous()

    return query.transpose(1, 2).contiguous(), gather(inputs.cache.key), gather(inputs.cache.value)


def _bounds(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last-plus-one visible key of every row, both ``[batch, query_len]``."""
    bounds = torch.tensor(
        [
            [visible_range(row, span, shape.layer.window) for row in range(span.query_len)]
            for span in shape.spans()
        ],
        device=device,
    )
    return bounds[..., 0], bounds[..., 1]


def _flat(output: Tensor) -> Tensor:
    return output.transpose(1, 2).flatten(0, 1)


def prepare_sdpa(shape: Shape, inputs: Inputs) -> Run:
    """torch's own attention; its mask is dense, so it computes every pair."""
    query, key, value = _contiguous(shape, inputs)
    start, stop = _bounds(shape, query.device)
    position = torch.arange(key.shape[2], device=query.device)
    mask = (position >= start[..., None]) & (position < stop[..., None])
    mask = mask[:, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    scale = inputs.options.scale
    return lambda: _flat(attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True))


def prepare_vllm_unified(shape: Shape, inputs: Inputs) -> Run:
    """vLLM's kernel with its per-sequence causal tensor."""
    if inputs.query.device.type == "cpu":
        raise CannotExpressError("needs a GPU")
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise CannotExpressError(f"vLLM cannot be imported ({error})") from None
    spans, tables, starts = virtual_sequences(shape, inputs)
    device = inputs.query.device

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    window = shape.layer.window
    out = torch.empty_like(inputs.query)
    arguments: dict[str, Any] = dict(
        q=inputs.query, k=inputs.cache.key, v=inputs.cache.value, out=out,
        cu_seqlens_q=int32(starts), max_seqlen_q=max(span.query_len for span in spans),
        seqused_k=int32([span.seq_len for span in spans]),
        max_seqlen_k=max(span.seq_len for span in spans),
        softmax_scale=inputs.options.scale,
        causal=int32([int(span.split_point > 0) for span in spans]),
        window_size=(-1, -1) if window is None else (window.size - 1, 0),
        block_table=tables, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip
    if all(span.split_point > 0 for span in spans):
        arguments["causal"] = True

    def run() -> Tensor:
        unified_attention(**arguments)
        return out

    return run


def virtual_sequences(shape: Shape, inputs: Inputs) -> tuple[list[QuerySpan], Tensor, list[int]]:
    """Spans that are causal or bidirectional as a whole: a fused span becomes two."""
    spans, rows, starts = [], [], [0]
    for index, span in enumerate(shape.spans()):
        head = span.split_point
        for length, end, split in (
            (head, span.context_len + head, head),
            (span.query_len - head, span.seq_len, 0),
        ):
            if length > 0:
                spans.append(QuerySpan(length, end, split))
                rows.append(index)
                starts.append(starts[-1] + length)
    return spans, inputs.batch.block_tables[rows].contiguous(), starts


PEERS: dict[str, Callable[[Shape, Inputs], Run]] = {
    "sdpa": prepare_sdpa,
    "vllm_unified": prepare_vllm_unified,
}
