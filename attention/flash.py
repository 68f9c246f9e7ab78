"""vLLM's FlashAttention 4: the rows that it serves, and its call, with our kernel's arguments."""

from __future__ import annotations

from torch import Tensor
from vllm import envs
from vllm.config import AttentionConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import fa_utils

from dllm.attention.choice import FLASH, KINDS, OURS, choose_kernel
from dllm.attention.inputs import AttentionOptions, Layer, PagedKV, RaggedBatch


def flash_kinds(layer: Layer, attention: AttentionConfig, option: str | None) -> list[str]:
    """The kinds of a layer's rows that it serves on this GPU, not with VLLM_BATCH_INVARIANT.

    ``option``: as of ``choose_kernel``, which raises.
    """
    capability = current_platform.get_device_capability()
    arch = 0 if capability is None else capability.to_int()
    is_allowed = attention.flash_attn_version in (None, 4) and not envs.VLLM_BATCH_INVARIANT
    has_flash = is_allowed and fa_utils.is_fa_version_supported(4)
    chosen = {kind: choose_kernel(layer, kind, arch, has_flash, option) for kind in KINDS}
    return [kind for kind in KINDS if chosen[kind] == FLASH]


def option_of(attention: AttentionConfig) -> str | None:
    """That option, where our backend serves: the server's configuration names version 4 where it
    gives rows to FlashAttention.
    """
    return None if attention.flash_attn_version == 4 else OURS


def flash_attention(
    query: Tensor, cache: PagedKV, batch: RaggedBatch, options: AttentionOptions, out: Tensor
) -> None:
    """As `canvas_attention`; max_query_len, which plans how keys are cut, is of this step.

    FlashAttention's windows do not count the row itself. The flag of a causal sequence cuts off the
    right side, but the keys there are read first, so max_ahead shortens that side for all. Flags
    are given always (`visible_pages` says what that costs): the key under which FlashAttention
    keeps compiled kernels leaves them out.
    """
    assert batch.first_keys is None and options.mask.block_length == 1 and not cache.is_fp8, options
    reach = None
    if options.mask.window is not None:
        behind = options.mask.window - 1
        reach = [behind, behind if batch.max_ahead is None else min(batch.max_ahead, behind)]
    fa_utils.flash_attn_varlen_func(
        q=query,
        # Hopper's loads need strides of 16 bytes, also of an axis of length 1 (one KV head).
        k=canonicalize_singleton_dim_strides(cache.key),
        v=canonicalize_singleton_dim_strides(cache.value),
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_len,
        block_table=batch.block_tables,
        softmax_scale=options.scale,
        softcap=options.logit_softcap,
        causal=reach is None,
        window_size=reach,
        dynamic_causal=batch.is_causal,
        fa_version=4,
    )
