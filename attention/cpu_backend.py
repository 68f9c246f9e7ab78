"""vLLM's CPU attention backend with the anchored canvas window.

vLLM's CPU kernel takes one causal flag per sequence and a sliding window relative to each query
row. That expresses causal rows and the symmetric window, but not the anchored one, in which every
row of a canvas sees the same keys: ``[canvas_start - (W - 1), canvas_end)`` (``attention.masks``).

A causal row at the canvas's last position with a window of ``W - 1 + width`` sees exactly these
keys. So each canvas row is handed to the kernel as a sequence of its own that ends with its
canvas. The kernel reads keys once per row instead of once per canvas: correct before fast.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)


@dataclass
class SubBatch:
    """Some query rows of a batch under one window, as the CPU kernel takes them.

    Attributes:
        tokens: ``[rows]`` int64, their places on the flat token axis.
        window: keys a row sees, itself included.
        is_causal: whether it sees them before it only, or on both sides.
        query_start_loc, seq_lens, block_table, scheduler_metadata: of these rows alone.
    """

    tokens: torch.Tensor
    window: int
    is_causal: bool
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scheduler_metadata: torch.Tensor


@dataclass
class AnchoredMetadata(CPUAttentionMetadata):
    """One sub-batch of causal rows, one of images, and one per canvas width."""

    sub_batches: tuple[SubBatch, ...] = ()


class AnchoredMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a batch into causal sequences and single canvas rows."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AnchoredMetadata:
        """Build for a batch whose ``causal`` is a tensor per sequence (a bool means all of them).

        A bidirectional sequence is one canvas, its query rows its last ``width`` positions, or
        one image (``mm_req_doc_ranges``): a prompt's image has the reference's symmetric window.
        """
        common = common_attn_metadata
        is_causal = np.full(common.num_reqs, common.causal is not False)
        if isinstance(common.causal, torch.Tensor):
            is_causal = common.causal[: common.num_reqs].numpy() != 0
        lens = np.diff(common.query_start_loc[: common.num_reqs + 1].numpy())
        sub_batches = []
        is_image = np.isin(np.arange(common.num_reqs), list(common.mm_req_doc_ranges or ()))
        for kind, one_sided in ((is_causal, True), (is_image, False)):
            whole = np.flatnonzero(kind)
            if len(whole):
                sub_batches.append(
                    self._sub_batch(common, whole, lens[whole], self.window_size, one_sided)
                )
        is_canvas = ~is_causal & ~is_image
        for width in np.unique(lens[is_canvas]).tolist():
            canvases = np.flatnonzero(is_canvas & (lens == width))
            window = self.window_size - 1 + width
            rows = np.repeat(canvases, width)
            sub_batches.append(self._sub_batch(common, rows, np.ones_like(rows), window))
        return AnchoredMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            sub_batches=tuple(sub_batches),
        )

    def _sub_batch(
        self,
        common: CommonAttentionMetadata,
        sequences: np.ndarray,
        query_lens: np.ndarray,
        window: int,
        is_causal: bool = True,
    ) -> SubBatch:
        """Attention of ``query_lens[i]`` rows that end where sequence ``sequences[i]`` does.

        A sequence that is named once per canvas row contributes its rows in order.
        """
        starts = common.query_start_loc.numpy()
        first_row = starts[sequences] + _occurrence(sequences)
        tokens = np.repeat(first_row, query_lens) + _ramp(query_lens)
        query_start_loc = torch.from_numpy(
            np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        )
        index = torch.from_numpy(sequences)
        seq_lens = common.seq_lens[index]
        return SubBatch(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            window=window,
            is_causal=is_causal,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor[index],
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(sequences),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                seq_lens=seq_lens,
                dtype=self.dtype,
                query_start_loc=query_start_loc,
                causal=is_causal,
                sliding_window_size=window,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
        )


class AnchoredAttentionImpl(CPUAttentionBackendImpl):
    """Runs the CPU kernel once per sub-batch."""

    def forward(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AnchoredMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``[tokens, heads, head_size]`` into ``output``; keys are already in the cache."""
        assert output_scale is None and output_block_scale is None, "no fused output quantization"
        if attn_metadata is None:  # a profiling run
            return output
        num_blocks, num_kv_heads, block_size, _ = kv_cache.size()
        pages = kv_cache.view(num_blocks, num_kv_heads, block_size * 2, -1)
        key_cache, value_cache = pages.chunk(2, dim=2)
        for sub_batch in attn_metadata.sub_batches:
            rows = torch.empty_like(output[: len(sub_batch.tokens)])
            ops.cpu_attention_with_kv_cache(
                query=query[sub_batch.tokens],
                key_cache=key_cache,
                value_cache=value_cache,
                output=rows,
                query_start_loc=sub_batch.query_start_loc,
                seq_lens=sub_batch.seq_lens,
                scale=self.scale,
                causal=sub_batch.is_causal,
                alibi_slopes=None,
                sliding_window=sub_batch.window,
                block_table=sub_batch.block_table,
                softcap=self.logits_soft_cap,
                scheduler_metadata=sub_batch.scheduler_metadata,
                s_aux=None,
                dynamic_causal=None,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            output[sub_batch.tokens] = rows
        return output


class AnchoredCPUBackend(CPUAttentionBackend):
    """CPU_ATTN for sliding layers whose canvas window is anchored."""

    @staticmethod
    def get_impl_cls() -> type[AnchoredAttentionImpl]:
        """The implementation of one layer."""
        return AnchoredAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AnchoredMetadataBuilder]:
        """The builder of one KV cache group."""
        return AnchoredMetadataBuilder


def use_anchored_window(layer: Attention) -> None:
    """Give a sliding-window layer the anchored backend, before KV allocation.

    The CPU platform offers no choice of backend, so the model makes it, layer by layer: other
    models in the process are not touched.
    """
    impl = layer.impl
    assert type(impl) is CPUAttentionBackendImpl, f"expected vLLM's CPU attention, got {type(impl)}"
    assert impl.sliding_window > 0, "only sliding-window layers can be anchored"
    assert impl.alibi_slopes is None and impl.sinks is None, "neither ALiBi nor sinks"
    layer.attn_backend = AnchoredCPUBackend
    layer.impl = AnchoredAttentionImpl(
        num_heads=impl.num_heads,
        head_size=impl.head_size,
        scale=impl.scale,
        num_kv_heads=impl.num_kv_heads,
        alibi_slopes=None,
        sliding_window=impl.sliding_window,
        kv_cache_dtype=impl.kv_cache_dtype,
        logits_soft_cap=impl.logits_soft_cap,
        attn_type=impl.attn_type,
        kv_sharing_target_layer_name=impl.kv_sharing_target_layer_name,
    )


def _ramp(lens: np.ndarray) -> np.ndarray:
    """``0 .. lens[0]-1, 0 .. lens[1]-1, ...``"""
    ends = np.cumsum(lens)
    return np.arange(ends[-1]) - np.repeat(ends - lens, lens)


def _occurrence(sequences: np.ndarray) -> np.ndarray:
    """How often each entry of a sorted array came before: ``[4, 4, 7] -> [0, 1, 0]``."""
    return np.arange(len(sequences)) - np.searchsorted(sequences, sequences)
