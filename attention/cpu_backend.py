"""vLLM's CPU attention backend, plus the anchored window of canvases.

vLLM's CPU kernel takes one causal flag per sequence and a sliding window relative to each query
row. That is enough for causal rows and the symmetric window. It is not enough for the anchored
window, in which every row of a canvas sees the same keys: ``[canvas_start - (W - 1), canvas_end)``
(`attention.masks`).

A causal row at the last position of a canvas of ``width`` rows, with a window of ``W - 1 + width``,
sees exactly these keys. So each canvas row is given to the kernel as a sequence of its own, with
one query row, that ends where its canvas ends. The price: keys are read once per row instead of
once per canvas.
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
    """Query rows of a batch that share one window: the arguments of one call of the CPU kernel.

    Attributes:
        tokens: ``[rows]`` int64, where the rows are on the batch's flat token axis. None: they
            are the whole batch, in order.
        window: how many keys a row sees to one side, itself included.
        is_causal: whether a row sees only the keys before it, or those on both sides.
        query_start_loc, seq_lens, block_table, scheduler_metadata: as the kernel expects them, for
            these rows alone.
    """

    tokens: torch.Tensor | None
    window: int
    is_causal: bool
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scheduler_metadata: torch.Tensor


@dataclass
class AnchoredMetadata(CPUAttentionMetadata):
    """At most one sub-batch of causal rows, one of images, and one for each canvas width."""

    sub_batches: tuple[SubBatch, ...] = ()


class AnchoredMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a batch into causal sequences and single canvas rows."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AnchoredMetadata:
        """Build the sub-batches of a batch.

        ``causal`` is a flag for each sequence (a tensor), or one for all of them. A bidirectional
        sequence is either one canvas, whose rows are its last ``width`` positions, or one image of
        a prompt (a key of ``mm_req_doc_ranges``), which has the symmetric window as in Hugging
        Face's model.
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
        """A kernel call with ``query_lens[i]`` rows of sequence ``sequences[i]``, for every i.

        The rows end where the sequence ends. A sequence that is named several times, once for each
        row of its canvas, gives its rows in order; each is a sequence of one row for the kernel.
        """
        starts = common.query_start_loc.numpy()
        first_row = starts[sequences] + _occurrence(sequences)
        tokens = np.repeat(first_row, query_lens) + _ramp(query_lens)
        query_start_loc = torch.from_numpy(
            np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        )
        index = torch.from_numpy(sequences)
        seq_lens = common.seq_lens[index]
        is_whole = len(tokens) == common.num_actual_tokens  # never a token twice
        return SubBatch(
            tokens=None if is_whole else torch.from_numpy(tokens.astype(np.int64)),
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
    """Attention of one layer: runs the CPU kernel once per sub-batch."""

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
            tokens = sub_batch.tokens
            num_actual = attn_metadata.num_actual_tokens
            rows = (
                output[:num_actual] if tokens is None else torch.empty_like(output[: len(tokens)])
            )
            ops.cpu_attention_with_kv_cache(
                query=query[:num_actual] if tokens is None else query[tokens],
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
            if tokens is not None:
                output[tokens] = rows
        return output


class AnchoredCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend (CPU_ATTN) for sliding layers whose canvas window is anchored."""

    @staticmethod
    def get_impl_cls() -> type[AnchoredAttentionImpl]:
        """The implementation of one layer."""
        return AnchoredAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AnchoredMetadataBuilder]:
        """The builder of one KV cache group."""
        return AnchoredMetadataBuilder


def use_anchored_window(layer: Attention) -> None:
    """Give one sliding-window layer the anchored backend; call it before the KV cache is allocated.

    vLLM offers no choice of backend on a CPU, so the model chooses for each of its layers. Other
    models in the process keep vLLM's backend.
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
    """Count within each of some runs: ``[2, 3] -> [0, 1, 0, 1, 2]``."""
    ends = np.cumsum(lens)
    return np.arange(ends[-1]) - np.repeat(ends - lens, lens)


def _occurrence(sequences: np.ndarray) -> np.ndarray:
    """How often each entry of a sorted array stands before itself: ``[4, 4, 7] -> [0, 1, 0]``."""
    return np.arange(len(sequences)) - np.searchsorted(sequences, sequences)
