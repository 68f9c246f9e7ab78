"""vLLM's attention backend for CUDA that runs our kernel; registered under the name CUSTOM.

Rows for which vLLM's FlashAttention is faster go there (`choice`, `calls`): the cache is the same.

It takes the batch as vLLM's own backends do: sequences, each with query rows, a length and pages;
and in ``CommonAttentionMetadata.causal`` an int32 tensor ``[num_reqs]``, which says of each
whether it is causal. Passes of a drafter have True or False there, for all sequences.

The tensors are read on the device, so one captured CUDA graph serves every step with as many
sequences.
"""

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from dllm.attention.cache_write import check_write, write_kv
from dllm.attention.calls import MIXED, Call, calls_of
from dllm.attention.canvas_attention import canvas_attention, plan_of
from dllm.attention.choice import CANVASES, CAUSAL
from dllm.attention.flash import flash_attention, flash_kinds, option_of
from dllm.attention.inputs import (
    FP8_OF,
    MAX_HEAD_SIZE,
    MIN_HEAD_SIZE,
    AttentionOptions,
    Layer,
    PagedKV,
    RaggedBatch,
    check_inputs,
)
from dllm.attention.masks import Mask
from dllm.attention.planning import BatchShape
from dllm.attention.visible_pages import VisiblePages


@dataclass
class CanvasAttentionMetadata:
    """A batch as the layers of one KV cache group see it; its first num_actual_tokens are real."""

    calls: list[Call]
    num_actual_tokens: int


class CanvasAttentionMetadataBuilder(AttentionMetadataBuilder[CanvasAttentionMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        masks = {impl.mask for impl in impls}
        assert len(masks) == 1, f"layers of one KV cache group have the masks {masks}"
        self._mask: Mask = masks.pop()
        scheduler = vllm_config.scheduler_config
        self._max_query_len = max(
            impl.max_query_len or scheduler.max_num_batched_tokens for impl in impls
        )
        self._max_model_len = vllm_config.model_config.max_model_len
        layer = Layer(
            head_size=impls[0].head_size,
            mask=self._mask,
            dtype=vllm_config.model_config.dtype,
            cache_dtype=FP8_OF.get(impls[0].kv_cache_dtype),
        )
        attention, self._shorten = vllm_config.attention_config, None
        self._flash_kinds = flash_kinds(layer, attention, option_of(attention))
        window = self._mask.window
        if window is not None and self._flash_kinds:
            page_size = kv_cache_spec.block_size
            if self._max_model_len >= window + page_size:  # or nothing can be left out
                sizes = window, page_size, scheduler.max_num_seqs
                self._shorten = VisiblePages(*sizes, scheduler.max_num_batched_tokens, device)
        # Tensors with an entry for each sequence: True, False, and first keys. They lie in memory
        # that a captured CUDA graph reads again. A batch of more sequences than max_num_seqs is no
        # full graph's, so its tensors may lie anywhere.
        self._flags = {
            flag: torch.full((scheduler.max_num_seqs,), flag, dtype=torch.int32, device=device)
            for flag in (True, False)
        }
        self._first_keys = torch.empty_like(self._flags[True])

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CanvasAttentionMetadata:
        """max_seq_len is of this step: it decides only whether any sequence can be split."""
        return self._metadata(common_attn_metadata, common_attn_metadata.max_seq_len)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> CanvasAttentionMetadata:
        """The bounds hold for every replay of the graph."""
        return self._metadata(common_attn_metadata, self._max_model_len)

    def _metadata(
        self, common: CommonAttentionMetadata, max_seq_len: int
    ) -> CanvasAttentionMetadata:
        num_seqs, kind = common.num_reqs, _kind_of(common)
        is_causal = common.causal
        if isinstance(is_causal, bool):
            is_causal = self._flags[is_causal][:num_seqs]
        batch = RaggedBatch(
            query_start_loc=common.query_start_loc[: num_seqs + 1],
            seq_lens=common.seq_lens[:num_seqs],
            block_tables=common.block_table_tensor[:num_seqs],
            is_causal=is_causal,
            first_keys=self._anchors(common, is_causal) if self._mask.is_anchored else None,
            max_query_len=self._max_query_len,
            max_seq_len=max_seq_len,
            max_ahead=_max_ahead(common, kind),
        )
        calls = calls_of(batch, kind, self._flash_kinds, common.max_query_len, self._shorten)
        return CanvasAttentionMetadata(calls, common.num_actual_tokens)

    def _anchors(self, common: CommonAttentionMetadata, is_causal: torch.Tensor) -> torch.Tensor:
        """`Mask.first_key` of each sequence, or -1; images are keys of ``mm_req_doc_ranges``."""
        num_seqs, window = common.num_reqs, self._mask.window
        assert window is not None
        query_lens = common.query_start_loc[: num_seqs + 1].diff()
        first_rows = common.seq_lens[:num_seqs] - query_lens
        anchors = (first_rows - (window - 1)).clamp_(min=0)
        first_keys = torch.where(is_causal != 0, -1, anchors)
        if common.mm_req_doc_ranges:
            images = torch.tensor(list(common.mm_req_doc_ranges), dtype=torch.int64)
            if first_keys.is_cuda:  # or the copy waits for the device
                images = images.pin_memory()
            first_keys.index_fill_(0, images.to(first_keys.device, non_blocking=True), -1)
        if num_seqs > len(self._first_keys):
            return first_keys
        return self._first_keys[:num_seqs].copy_(first_keys)


def _kind_of(common: CommonAttentionMetadata) -> str:
    """As far as the host knows; is_prefilling is True for causal sequences."""
    if isinstance(common.causal, bool):
        return CAUSAL if common.causal else CANVASES
    heads = common.is_prefilling
    if heads is None or 0 < int(heads.sum()) < len(heads):
        return MIXED
    return CAUSAL if heads[0] else CANVASES


def _max_ahead(common: CommonAttentionMetadata, kind: str) -> int:
    """How far behind a row, at most, the last key is that it sees: 0 for causal rows."""
    heads = common.is_prefilling
    if kind == CAUSAL:
        return 0
    if kind == CANVASES or heads is None:
        return common.max_query_len - 1
    return int(common.query_start_loc_cpu.diff()[~heads].max()) - 1


class CanvasAttentionImpl(AttentionImpl[CanvasAttentionMetadata]):
    """Attention of one layer."""

    # Rows that a sequence of this layer has at most, None for those of a step. It is the same for
    # every step: with the longest sequence of each, tile heights would depend on who shares the
    # batch and on whether a CUDA graph runs it, and so would the bits of a sequence.
    max_query_len: int | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or sinks is not None:
            raise NotImplementedError("the CUSTOM attention backend of dllm has no ALiBi, no sinks")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attention of type {attn_type}; dllm has decoder attention")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.mask = Mask(sliding_window)  # `layers.see` may give it another one
        self._cache: PagedKV | None = None  # the memory of ``_viewed``
        self._viewed: weakref.ref[torch.Tensor] | None = None
        self._read_cache: PagedKV | None = None  # checked against the layer's queries
        self._written_cache: PagedKV | None = None  # and against its keys
        self._vllm_config = get_current_vllm_config_or_none()  # None outside of a server

    @cached_property
    def options(self) -> AttentionOptions:
        """First asked for when the model is made."""
        return AttentionOptions(float(self.scale), self.mask, self.logits_soft_cap)

    def _largest_shape(self) -> BatchShape | None:
        """Of all steps. A request of a diffusion model is up to two sequences; images make more."""
        if self._vllm_config is None:
            return None
        config, scheduler = self._vllm_config, self._vllm_config.scheduler_config
        num_seqs = scheduler.max_num_seqs * (1 if config.diffusion_config is None else 2)
        if config.model_config.is_mm_prefix_lm:
            num_seqs = scheduler.max_num_batched_tokens
        return BatchShape(
            num_tokens=scheduler.max_num_batched_tokens,
            num_seqs=num_seqs,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_query_len=self.max_query_len or scheduler.max_num_batched_tokens,
            max_seq_len=config.model_config.max_model_len,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CanvasAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``[tokens, heads, head_size]`` into ``output``; keys are already in the cache."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization")
        if attn_metadata is None:  # vLLM measures the memory of the largest step
            if (shape := self._largest_shape()) is not None:
                is_fp8 = self.kv_cache_dtype in FP8_OF
                plan = plan_of(shape, query, self.options, is_fp8)
                query.new_empty(plan.workspace_elements(shape), dtype=torch.float32)
            return output.zero_()
        tokens = attn_metadata.num_actual_tokens
        cache, query, out = self.paged_kv(layer, kv_cache), query[:tokens], output[:tokens]
        if self._read_cache is not cache:  # once: nothing but lengths differs between steps
            check_inputs(query, cache, attn_metadata.calls[0].batch, out)
            self._read_cache = cache
        for call in attn_metadata.calls:
            attend = flash_attention if call.is_flash else canvas_attention
            attend(query, cache, call.batch, self.options, out)
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Slot -1 is padding."""
        cache = self.paged_kv(layer, kv_cache)
        if self._written_cache is not cache:  # once, as above
            check_write(key, value, cache, slot_mapping)
            self._written_cache = cache
        write_kv(key, value, cache, slot_mapping)

    def paged_kv(self, layer: AttentionLayer, kv_cache: torch.Tensor) -> PagedKV:
        """Of vLLM's ``[pages, kv_heads, page_size, 2 * head_size]`` cache.

        Kept until vLLM drops the cache, as it does with that of its memory profile.
        """
        if self._cache is None or self._viewed is None or self._viewed() is not kv_cache:
            # No view of vLLM's tensor, which would keep it.
            memory = kv_cache.untyped_storage(), kv_cache.storage_offset()
            whole = kv_cache.new_empty(0).set_(*memory, kv_cache.shape, kv_cache.stride())
            key, value = whole.transpose(1, 2).split(self.head_size, dim=-1)
            fp8 = FP8_OF.get(self.kv_cache_dtype)
            if fp8 is None:
                self._cache = PagedKV(key, value)
            else:
                scales = layer._k_scale, layer._v_scale
                self._cache = PagedKV(key.view(fp8), value.view(fp8), *scales)
            self._viewed = weakref.ref(kv_cache, self._forget)
        return self._cache

    def _forget(self, viewed: object) -> None:
        if viewed is self._viewed:
            self._cache = self._read_cache = self._written_cache = None


class CanvasAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [  # type: ignore[assignment]
        "auto",
        "float16",
        "bfloat16",
        *FP8_OF,
    ]
    # vLLM calls do_kv_cache_update by itself, and so does the drafter, for keys of its context.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry that plugins may take."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CanvasAttentionImpl]:
        return CanvasAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CanvasAttentionMetadataBuilder]:
        return CanvasAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Those that are no power of two are padded in registers."""
        return MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Images whose rows see each other come as bidirectional sequences of their own."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A sequence's bits do not depend on who shares its batch."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER
