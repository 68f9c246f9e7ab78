"""Paged attention for causal and bidirectional sequences: the Triton kernel and its wrapper.

For row i of a sequence, query head h and the keys k in [start_i, stop_i) that row i sees:

    s_ik = scale * <q_i, k_k>                      (cap * tanh(s_ik / cap) with a soft cap)
    o_i  = sum_k exp(s_ik - m_i) v_k / sum_k exp(s_ik - m_i),   m_i = max_k s_ik

computed one tile of keys after the other with a running maximum (FlashAttention-2, Dao 2023,
arXiv:2307.08691). exp(x) is computed as exp2(x * log2(e)), the factor multiplied into the scale.
`masks.visible_range` defines [start_i, stop_i).

- GROUP query heads share one KV head. A *pair* is one query row with one of these heads; pairs are
  numbered row * GROUP + head. A *row tile* is BLOCK_M consecutive pairs of one sequence and KV
  head: K and V are loaded once for all heads that share them, and a tile is full whatever GROUP is.
- A program takes one row tile and loops over the union of its rows' key ranges. Cache slots outside
  the union are never loaded. Only tiles with keys that some of the rows do not see are masked.
- Long sequences are split along the keys, by a rule that looks at one sequence alone: who shares
  the batch does not change a sequence's bits (`planning.py`, `splits.py`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm.attention.inputs import AttentionOptions, PagedKV, RaggedBatch
from dllm.attention.online_softmax import attend
from dllm.attention.planning import AttentionPlan, BatchShape, plan_attention
from dllm.attention.splits import (
    ANY_ALIGNMENT,
    CHANGING,
    merge_splits_kernel,
    num_splits_on_device,
    partial_row_on_device,
    visible_keys_on_device,
)
from dllm.attention.tuning import TARGET_PROGRAMS, next_power_of_2, tile_config


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a row tile: the last i with first_tile(i) = query_start_loc[i] * GROUP // BLOCK_M + i <=
    tile.

    The "+ i" leaves room for rounding up in every sequence before, so that their tiles need not be
    summed. A tile that is left over has no pairs.
    """
    low: tl.int32 = 0
    high = num_seqs
    while low < high:
        mid = (low + high) // 2
        first_tile = tl.load(query_start_loc + mid) * GROUP // BLOCK_M + mid
        if first_tile <= tile:
            low = mid + 1
        else:
            high = mid
    return low - 1


@triton.jit
def pairs_of_tile(query_start_loc, seq, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first token and row of a tile, then of each pair ``[BLOCK_M]`` its row minus the first
    row, its head within the group, and whether it exists.

    Pairs beyond the sequence repeat its last pair, so that they load valid memory and do not widen
    the range of keys. The loads are volatile: without that the compiler would keep the results in
    registers during the whole loop over keys, behind which the kernel calls this again.
    """
    query_start = tl.load(query_start_loc + seq, volatile=True)
    num_pairs = (tl.load(query_start_loc + seq + 1, volatile=True) - query_start) * GROUP
    first_pair = (tile - query_start * GROUP // BLOCK_M - seq) * BLOCK_M
    first_row = first_pair // GROUP
    pair = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pair < num_pairs
    pair = tl.minimum(pair, num_pairs - 1)
    return query_start + first_row, first_row, pair // GROUP - first_row, pair % GROUP, is_pair


@triton.jit
def row_bounds(
    row, query_len, seq_len, is_causal, first_key,
    WINDOW: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """The keys [start, stop) that each row sees: `masks.visible_range` for a vector of rows.

    row ``[BLOCK_M]``; the others are of their sequence. first_key: -1 for none. WINDOW: 0 for none.
    BLOCK_LENGTH: 1 for none.
    """
    pos = seq_len - query_len + row
    if BLOCK_LENGTH > 1:
        stop = tl.where(is_causal, (pos // BLOCK_LENGTH + 1) * BLOCK_LENGTH, seq_len)
    else:
        stop = tl.where(is_causal, pos + 1, seq_len)
    start = tl.zeros_like(pos)
    if WINDOW > 0:
        has_window = first_key < 0
        start = tl.maximum(tl.where(has_window, pos - (WINDOW - 1), first_key), 0)
        stop = tl.where(has_window, tl.minimum(stop, pos + WINDOW), stop)
    stop = tl.minimum(tl.maximum(stop, 0), seq_len)
    return start, stop


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def canvas_attention_kernel(
    out, query, key_cache, value_cache, k_scale, v_scale, partial_acc, partial_max, partial_sum,
    query_start_loc, seq_lens, block_tables, is_causal, first_keys,
    scale, softcap, num_seqs, num_partial_rows, partial_rows_per_seq, max_splits,
    out_stride_token, out_stride_head, q_stride_token, q_stride_head,
    k_stride_page, k_stride_slot, k_stride_head,
    v_stride_page, v_stride_slot, v_stride_head, table_stride,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_FIRST_KEYS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, SPLIT_ROWS: tl.constexpr, MIN_KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """BLOCK_V output columns of one row tile. Grid: (row tiles, KV heads x column blocks, splits).

    out, query ``[num_tokens, num_heads, head_size]``; caches ``[num_pages, page_size, num_kv_heads,
    head_size]``. Sequences that are split write their results to partial_acc ``[max_splits,
    num_partial_rows, num_heads, head_size]`` fp32, and to partial_max and partial_sum, which have
    no last axis; the others write ``out``. Nothing but the rows of this tile is written.
    """
    # Under a causal mask the last row tiles see most keys and take longest, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    VALUE_BLOCKS: tl.constexpr = (HEAD_SIZE + BLOCK_V - 1) // BLOCK_V
    kv_head = tl.program_id(1) // VALUE_BLOCKS
    value_block = tl.program_id(1) % VALUE_BLOCKS
    value_dim = value_block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value_dim = value_dim < HEAD_SIZE
    seq = find_sequence(query_start_loc, tile, num_seqs, GROUP, BLOCK_M)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    first_pair = (tile - query_start * GROUP // BLOCK_M - seq) * BLOCK_M
    if (first_pair >= query_len * GROUP) | (seq_len == 0):
        return

    _, first_row, row, _, _ = pairs_of_tile(query_start_loc, seq, tile, GROUP, BLOCK_M)
    row += first_row  # [pairs]: the row of the sequence that each pair belongs to
    first_key = tl.full((), -1, tl.int32)
    if HAS_FIRST_KEYS:
        first_key = tl.load(first_keys + seq)
    row_start, row_stop = row_bounds(
        row, query_len, seq_len, tl.load(is_causal + seq) != 0, first_key, WINDOW, BLOCK_LENGTH
    )
    # Keys that any row of the tile sees, and keys that all of them see.
    union_low, union_high = tl.min(row_start, 0), tl.max(row_stop, 0)
    common_low, common_high = tl.max(row_start, 0), tl.min(row_stop, 0)

    logit_scale = scale
    if HAS_K_SCALE:  # scaling the logits is the same as scaling the keys, and is less work
        logit_scale = scale * tl.load(k_scale)
    table = block_tables + seq.to(tl.int64) * table_stride
    key_base = key_cache + kv_head.to(tl.int64) * k_stride_head
    value_base = value_cache + kv_head.to(tl.int64) * v_stride_head

    # All tiles of a sequence cut its keys at the same places, which are multiples of BLOCK_N.
    num_keys = visible_keys_on_device(query_len, seq_len, WINDOW)
    num_splits = num_splits_on_device(
        query_len, num_keys, max_splits, GROUP, NUM_KV_HEADS, VALUE_BLOCKS,
        SPLIT_ROWS, MIN_KEYS, PROGRAMS,
    )  # fmt: skip
    split_base = (seq_len - num_keys) // BLOCK_N * BLOCK_N
    split_len = tl.cdiv(tl.cdiv(seq_len - split_base, num_splits), BLOCK_N) * BLOCK_N

    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        low = tl.maximum(union_low, split_base + split * split_len)
        high = tl.minimum(union_high, split_base + (split + 1) * split_len)
        # Key tiles [tile_low, tile_high) overlap [low, high); those in [mid_low, mid_high) lie in
        # the part that all rows see, and need no mask.
        tile_low = low // BLOCK_N
        tile_high = tl.where(high > low, tl.cdiv(high, BLOCK_N), tile_low)
        mid_low = tl.minimum(tl.cdiv(tl.maximum(common_low, low), BLOCK_N), tile_high)
        mid_high = tl.maximum(tl.minimum(common_high, high) // BLOCK_N, mid_low)
        mid_high = tl.minimum(mid_high, tile_high)

        # Q is loaded again for each part. Kept across parts, it would occupy the shared memory that
        # storing the output needs.
        first_token, _, row, in_group, _ = pairs_of_tile(query_start_loc, seq, tile, GROUP, BLOCK_M)
        dim = tl.arange(0, PADDED_SIZE)
        q_base = query + first_token.to(tl.int64) * q_stride_token + kv_head * GROUP * q_stride_head
        q = tl.load(
            q_base + (row * q_stride_token + in_group * q_stride_head)[:, None] + dim[None, :],
            mask=(dim < HEAD_SIZE)[None, :],
            other=0.0,
        )
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [pairs]
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)  # [pairs, value columns]
        # First the tiles in the middle without masks, then the edges on both sides with masks.
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, row_start, row_stop,
            mid_high - mid_low, mid_low, mid_high, 0, low, high,
            table, key_base, value_base,
            k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
            logit_scale, softcap, value_dim, HEAD_SIZE, PADDED_SIZE, PAGE_SIZE, BLOCK_N, SOFTCAP,
            UPCAST, MASKED=False,
        )  # fmt: skip
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, row_start, row_stop,
            tile_high - tile_low - (mid_high - mid_low), tile_low, mid_low, mid_high - mid_low,
            low, high, table, key_base, value_base,
            k_stride_page, k_stride_slot, v_stride_page, v_stride_slot,
            logit_scale, softcap, value_dim, HEAD_SIZE, PADDED_SIZE, PAGE_SIZE, BLOCK_N, SOFTCAP,
            UPCAST, MASKED=True,
        )  # fmt: skip

        first_token, first_row, row, in_group, is_pair = pairs_of_tile(
            query_start_loc, seq, tile, GROUP, BLOCK_M
        )
        mask = is_pair[:, None] & is_value_dim[None, :]
        if num_splits == 1:
            result = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
            if HAS_V_SCALE:
                result *= tl.load(v_scale)
            out_base = out + first_token.to(tl.int64) * out_stride_token
            out_base += kv_head * GROUP * out_stride_head
            offset = row * out_stride_token + in_group * out_stride_head
            tl.store(
                out_base + offset[:, None] + value_dim[None, :],
                result.to(out.dtype.element_ty),
                mask,
            )
        else:
            partial_row = partial_row_on_device(seq, first_row, first_token, partial_rows_per_seq)
            part = (split * num_partial_rows + partial_row) * (GROUP * NUM_KV_HEADS)
            part += kv_head * GROUP
            offset = row * (GROUP * NUM_KV_HEADS) + in_group
            # The programs of all column blocks have the same max and sum, and all store them.
            tl.store(partial_max + part + offset, row_max, is_pair)
            tl.store(partial_sum + part + offset, row_sum, is_pair)
            acc_base = partial_acc + part * HEAD_SIZE
            tl.store(acc_base + (offset * HEAD_SIZE)[:, None] + value_dim[None, :], acc, mask)


# False where Triton interprets kernels on a CPU (TRITON_INTERPRET=1 when Triton was imported).
_IS_COMPILED = isinstance(canvas_attention_kernel, triton.JITFunction)


@functools.lru_cache
def _arch_of(device: torch.device) -> int:
    """90 for compute capability 9.0; Hopper's on a CPU, which has none."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def batch_shape(query: Tensor, cache: PagedKV, batch: RaggedBatch) -> BatchShape:
    """max_seq_len is at most what a row of the block table can hold."""
    capacity = batch.block_tables.shape[1] * cache.page_size
    bound = capacity if batch.max_seq_len is None else min(batch.max_seq_len, capacity)
    num_tokens, num_heads, head_size = query.shape
    return BatchShape(
        num_tokens=num_tokens,
        num_seqs=batch.num_seqs,
        num_heads=num_heads,
        num_kv_heads=cache.key.shape[2],
        head_size=head_size,
        max_query_len=batch.max_query_len,
        max_seq_len=bound,
    )


def plan_of(
    shape: BatchShape, query: Tensor, options: AttentionOptions, is_fp8_cache: bool
) -> AttentionPlan:
    """With tile sizes from `tuning.py`; ``query`` says the dtype and the device."""
    arch = _arch_of(query.device)
    config = tile_config(shape.head_size, query.element_size(), arch, is_fp8_cache)
    return plan_attention(shape, config, options.mask.window)


def canvas_attention(
    query: Tensor, cache: PagedKV, batch: RaggedBatch, options: AttentionOptions, out: Tensor
) -> None:
    """query, out ``[num_tokens, num_heads, head_size]`` fp16, bf16 or fp32, in other memory.

    A row that sees no key gets zeros. Padding tokens and sequences with seq_len 0 are not written.
    K and V of the query tokens are in the cache already. The arguments must fit together:
    `inputs.check_inputs`. Never waits for the device and may be captured in a CUDA graph.
    """
    shape = batch_shape(query, cache, batch)
    plan = plan_of(shape, query, options, cache.is_fp8)
    workspace = query.new_empty(plan.workspace_elements(shape), dtype=torch.float32)
    launch(query, cache, batch, options, out, plan, workspace)


def launch(
    query: Tensor,
    cache: PagedKV,
    batch: RaggedBatch,
    options: AttentionOptions,
    out: Tensor,
    plan: AttentionPlan,
    workspace: Tensor,
) -> None:
    """``workspace``: ``plan.workspace_elements`` fp32 elements, which are overwritten."""
    num_tokens, num_heads, head_size = query.shape
    if num_tokens == 0 or batch.num_seqs == 0:
        return
    num_kv_heads = cache.key.shape[2]
    group, config = num_heads // num_kv_heads, plan.config
    rows = plan.max_splits * plan.num_partial_rows * num_heads
    # The accumulators first, so that they are aligned for any number of rows.
    partial_acc, partial_max = workspace, workspace[rows * head_size :]
    partial_sum = partial_max[rows:]
    window = options.mask.window
    shared = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "PADDED_SIZE": max(16, next_power_of_2(head_size)),
        "WINDOW": window or 0,
        "HAS_V_SCALE": cache.v_scale is not None,
        "SPLIT_ROWS": config.block_m,
        "MIN_KEYS": config.keys_per_split(window),
        "PROGRAMS": TARGET_PROGRAMS,
    }
    grid = (plan.num_row_tiles, num_kv_heads * plan.value_blocks, plan.split_programs)
    canvas_attention_kernel[grid](
        out, query, cache.key, cache.value, cache.k_scale, cache.v_scale,
        partial_acc, partial_max, partial_sum,
        batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.is_causal,
        batch.first_keys,
        options.scale, options.logit_softcap, batch.num_seqs, plan.num_partial_rows,
        plan.partial_rows_per_seq, plan.max_splits, *out.stride()[:2], *query.stride()[:2],
        *cache.key.stride()[:3], *cache.value.stride()[:3], batch.block_tables.stride(0),
        PAGE_SIZE=cache.page_size, HAS_FIRST_KEYS=batch.first_keys is not None,
        SOFTCAP=options.logit_softcap > 0, HAS_K_SCALE=cache.k_scale is not None,
        BLOCK_M=plan.block_m, BLOCK_N=config.block_n,
        BLOCK_V=plan.block_v,
        UPCAST=query.dtype == torch.bfloat16 and not _IS_COMPILED,
        BLOCK_LENGTH=options.mask.block_length,
        num_warps=config.num_warps, num_stages=config.num_stages, **shared,
    )  # fmt: skip
    if plan.is_split:
        merge_splits_kernel[(num_tokens, num_kv_heads)](
            out, cache.v_scale, partial_acc, partial_max, partial_sum,
            batch.query_start_loc, batch.seq_lens, batch.num_seqs,
            plan.num_partial_rows, plan.partial_rows_per_seq, plan.max_splits, *out.stride()[:2],
            VALUE_BLOCKS=plan.value_blocks, PADDED_GROUP=next_power_of_2(group), **shared,
        )  # fmt: skip
