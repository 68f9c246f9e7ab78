"""vLLM's CPU attention backend, plus the anchored window, blocks, and an FP8 cache that is rounded.

Our CPU worker registers it as CPU_ATTN, so that all layers of its process have it.

vLLM's CPU kernel takes sequences that are causal or bidirectional, and one symmetric window for all
of them. It knows neither blocks nor a first visible key (`masks.py`). So a batch is translated:

blocks          Of a causal sequence, each block becomes a bidirectional sequence of its own that
                ends with the block.
first keys      All rows of a canvas see the W - 1 keys before it and the whole canvas. A causal
                sequence whose only row is the canvas' last position sees just these, if the window
                is W - 1 + the canvas' width. So each row of a canvas becomes such a sequence. The
                price: keys are read once per row instead of once per canvas. The kernel is called
                once for each width, and once for causal sequences and images.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from dllm.attention.inputs import FP8_OF
from dllm.attention.masks import ALL, Mask
from dllm.attention.ragged import spread, starts_of

# vLLM's kernel truncates what it writes to an FP8 cache: an error of 5%, where rounding to nearest
# has 2.6%. So values are rounded first, and raised by this factor: the kernel divides them by the
# scale, and if that gave a little less, truncating would give the number below. 2^-6 of the value
# is more than that error, and less than half the distance to the next number, which is 2^-4 or more
# (E4M3 has 3 mantissa bits).
ABOVE = 1 + 2.0**-6


@dataclass
class Part:
    """One call of the kernel."""

    # The part's query rows on the batch's flat token axis: a slice if they are neighbours, so that
    # nothing is copied, else ``[rows]`` int64.
    tokens: slice | torch.Tensor
    window: int  # in keys; -1 for none
    metadata: CPUAttentionMetadata


Calls: TypeAlias = CPUAttentionMetadata | list[Part]  # of a layer in a step; vLLM's is one call


class CanvasCPUBuilder(CPUAttentionMetadataBuilder):
    """The calls for layers of one KV cache group; by mask, if the layers differ in it."""

    window_size: int

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], *args: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args)
        layers = self.vllm_config.compilation_config.static_forward_context
        self.masks: set[Mask] = {layers[name].impl.mask for name in layer_names}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Calls | dict[Mask, Calls]:  # type: ignore[override]
        """In a layer with an anchored window, a bidirectional sequence is a canvas unless it is a
        key of ``mm_req_doc_ranges``: an image.
        """
        calls = {mask: self._calls(common_attn_metadata, mask) for mask in self.masks}
        return calls if len(calls) > 1 else calls.popitem()[1]

    def _calls(self, common: CommonAttentionMetadata, mask: Mask) -> Calls:
        if mask.is_anchored:
            return list(self._anchored(common))
        if mask.block_length > 1:
            return [self._blocks(common, mask.block_length)]
        return super().build(0, common)

    def _blocks(self, common: CommonAttentionMetadata, block_length: int) -> Part:
        """A single call, in which each block of a causal sequence is a bidirectional one."""
        is_causal, lens = _is_causal(common), _query_lens(common)
        stops = common.seq_lens.numpy()
        starts = stops - lens
        whole = np.maximum(stops, 1)  # one block of all keys
        size = np.where(is_causal, block_length, whole)
        counts = np.maximum(-(-stops // size) - starts // size, 1)
        source, number = spread(starts_of(counts))
        first = (starts[source] // size[source] + number) * size[source]
        seq_lens = np.minimum(first + size[source], stops[source])
        query_lens = seq_lens - np.maximum(first, starts[source])
        tokens = np.arange(query_lens.sum())
        return self._part(common, source, query_lens, seq_lens, tokens, self.window_size, False)

    def _anchored(self, common: CommonAttentionMetadata) -> Iterator[Part]:
        """A call for causal sequences and images, and one for the canvases of each width."""
        is_causal, lens = _is_causal(common), _query_lens(common)
        stops, starts = common.seq_lens.numpy(), common.query_start_loc.numpy()
        is_image = np.isin(np.arange(common.num_reqs), list(common.mm_req_doc_ranges or ()))
        is_canvas = ~is_causal & ~is_image
        whole = np.flatnonzero(~is_canvas)
        if len(whole):
            rows, offsets = spread(starts_of(lens[whole]))
            tokens = starts[whole[rows]] + offsets
            causal = torch.from_numpy(is_causal[whole].astype(np.int32))
            yield self._part(
                common, whole, lens[whole], stops[whole], tokens, self.window_size, causal
            )
        # Each token of a canvas is a causal sequence of its own, which ends where the canvas does:
        # it sees all of the canvas. The window reaches as far back as that of its first token.
        for width in np.unique(lens[is_canvas]).tolist():
            canvases = np.flatnonzero(is_canvas & (lens == width))
            rows = np.repeat(canvases, width)
            tokens = (starts[canvases][:, None] + np.arange(width)).ravel()
            window = self.window_size - 1 + width
            yield self._part(common, rows, np.ones_like(rows), stops[rows], tokens, window, True)

    def _part(
        self,
        common: CommonAttentionMetadata,
        source: np.ndarray,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        tokens: np.ndarray,
        window: int,
        causal: bool | torch.Tensor,
    ) -> Part:
        """Number i has the pages of ``source[i]``."""
        starts = torch.from_numpy(starts_of(query_lens).astype(np.int32))
        part = replace(
            common,
            num_reqs=len(source),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(query_lens.max()),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_table_tensor=common.block_table_tensor[torch.from_numpy(source)],
            causal=causal,
        )
        usual, self.window_size = self.window_size, window
        metadata = super().build(0, part)
        self.window_size = usual
        first, num_tokens = int(tokens[0]), len(tokens)  # ascending
        are_neighbours = tokens[-1] - first == num_tokens - 1
        where = slice(first, first + num_tokens) if are_neighbours else torch.from_numpy(tokens)
        return Part(where, window, metadata)


class CanvasCPUImpl(CPUAttentionBackendImpl):
    sliding_window: int
    mask: Mask = ALL  # with blocks, or an anchored window (`layers.see`)

    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Calls | dict[Mask, Calls] | None,  # type: ignore[override]
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of padding become zero: vLLM's kernel leaves in them what was there, and products
        with AMX can carry a NaN into neighbouring rows.
        """
        if attn_metadata is None:  # profiling
            return output
        calls = attn_metadata[self.mask] if isinstance(attn_metadata, dict) else attn_metadata
        if isinstance(calls, list):
            parts = calls
        else:
            parts = [Part(slice(0, calls.num_actual_tokens), self.sliding_window, calls)]
        usual, scales = self.sliding_window, (output_scale, output_block_scale)
        if len(output) > (num_tokens := sum(part.metadata.num_actual_tokens for part in parts)):
            output[num_tokens:] = 0
        for part in parts:
            self.sliding_window, tokens = part.window, part.tokens
            own, rows = query[tokens], output[tokens]
            super().forward(layer, own, key, value, kv_cache, part.metadata, rows, *scales)
            if isinstance(tokens, torch.Tensor):  # else ``rows`` is a view
                output[tokens] = rows
        self.sliding_window = usual
        return output

    def do_kv_cache_update(
        self,
        layer: Attention,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Round what goes to an FP8 cache, as on a GPU; vLLM's kernel cuts it off."""
        if self.is_fp8_kv_cache:
            dtype = FP8_OF[self.kv_cache_dtype]
            key = nearest(key, dtype, layer._k_scale_float)
            value = nearest(value, dtype, layer._v_scale_float)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class CanvasCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CanvasCPUImpl]:
        return CanvasCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CanvasCPUBuilder]:
        return CanvasCPUBuilder


def _is_causal(common: CommonAttentionMetadata) -> np.ndarray:
    """``[num_reqs]`` bool."""
    if isinstance(common.causal, torch.Tensor):
        flags: np.ndarray = common.causal[: common.num_reqs].numpy() != 0
        return flags
    return np.full(common.num_reqs, common.causal)


def _query_lens(common: CommonAttentionMetadata) -> np.ndarray:
    return np.diff(common.query_start_loc[: common.num_reqs + 1].numpy())


def nearest(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values that give the nearest FP8 numbers when divided by ``scale`` and truncated."""
    largest = torch.finfo(dtype).max
    rounded = (values.float() / scale).clamp(-largest, largest).to(dtype).float()
    return (rounded * ABOVE * scale).to(values.dtype)
