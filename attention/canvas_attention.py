"""Paged attention for causal, bidirectional and mixed rows: the Triton kernel and its wrapper.

For row i of a sequence, query head h and the keys k in [start_i, stop_i) that row i sees:

    s_ik = scale * <q_i, k_k>                      (cap * tanh(s_ik / cap) with a soft cap)
    o_i  = sum_k exp(s_ik - m_i) v_k / sum_k exp(s_ik - m_i),   m_i = max_k s_ik

computed tile by tile with a running maximum (FlashAttention-2, Dao 2023, arXiv:2307.08691), in base 2
with log2(e) folded into the scale. The definition of [start_i, stop_i) is `masks.visible_range`.

- A tile holds BLOCK_M consecutive (row, head) pairs of one KV head, so K and V are loaded once for
  all query heads that share them, whatever the group size is.
- The tile's loop runs over the union of its rows' ranges; keys in the intersection of the ranges
  need no mask, so masks are applied in edge tiles only. Slots outside the union are never loaded.
- Long sequences are split along the keys (`planning.py`); the parts are merged in order, with the
  same instructions whoever merges them: the bits of a sequence do not depend on its batch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.inputs import AttentionOptions, PagedKV, RaggedBatch, check_inputs
from attention.planning import AttentionPlan, BatchShape, plan_attention
from attention.splits import (
    merge_parts,
    merge_splits_kernel,
    num_splits_on_device,
    visible_keys_on_device,
)
from attention.tuning import TARGET_PROGRAMS, next_power_of_2, tile_config


@triton.jit
def _find_sequence(query_start_loc, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence whose row tiles include ``tile``: the last i with first_tile(i) <= tile.

    first_tile(i) = query_start_loc[i] * GROUP // BLOCK_M + i leaves room for every sequence's
    ceil(rows / BLOCK_M) tiles without knowing the others' lengths. Binary search, log2(num_seqs) loads.
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
def _split_point(bidirectional_from, seq, query_len, IS_BOOL: tl.constexpr):
    """The first bidirectional row of a sequence, within [0, query_len]; True means a causal pass."""
    value = tl.load(bidirectional_from + seq)
    if IS_BOOL:
        point = tl.where(value != 0, query_len, 0)
    else:
        point = tl.minimum(tl.maximum(value, 0), query_len)
    return point


@triton.jit
def _row_bounds(row, query_len, seq_len, split_point, WINDOW: tl.constexpr, ANCHORED: tl.constexpr):
    """`masks.visible_range` for a vector of rows: the keys [start, stop) that each row sees."""
    context_len = seq_len - query_len
    pos = context_len + row
    is_causal = row < split_point
    stop = tl.where(is_causal, pos + 1, seq_len)
    start = tl.zeros_like(pos)
    if WINDOW > 0:
        if ANCHORED:
            start = tl.where(is_causal, pos, context_len + split_point) - (WINDOW - 1)
        else:
            start = pos - (WINDOW - 1)
            stop = tl.minimum(stop, pos + WINDOW)
        start = tl.maximum(start, 0)
    stop = tl.minimum(tl.maximum(stop, 0), seq_len)
    return start, stop


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b with fp32 sums. UPCAST is for Triton's interpreter, which cannot multiply bf16;
    a product of two bf16 numbers is exact in fp32, so the result is the same."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _attend(
    acc, row_max, row_sum, q, row_start, row_stop,
    num_tiles, first_tile, skip_tile, skip_count, low, high,
    table, key_base, value_base,
    k_stride_page, k_stride_slot, k_stride_dim, v_stride_page, v_stride_slot, v_stride_dim,
    logit_scale, softcap,
    HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take ``num_tiles`` tiles of keys into the running softmax.

    Tiles run from first_tile on and leave out skip_count of them at skip_tile (the middle, when
    the edges are taken). MASKED: keys outside [low, high) are not loaded, and each row takes only
    keys in its own [row_start, row_stop); otherwise every row sees every key of every tile.
    """
    dim = tl.arange(0, PADDED_SIZE)
    in_tile = tl.arange(0, BLOCK_N)
    LOG2E_: tl.constexpr = 1.4426950408889634
    for step in range(num_tiles):
        tile = first_tile + step
        tile = tl.where(tile >= skip_tile, tile + skip_count, tile)
        key_pos = tile * BLOCK_N + in_tile

        if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page
            page = tl.load(table + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)
            slot = tile * BLOCK_N % PAGE_SIZE + in_tile
        elif MASKED:
            is_loaded = (key_pos >= low) & (key_pos < high)
            page = tl.load(table + key_pos // PAGE_SIZE, mask=is_loaded, other=0).to(tl.int64)
            slot = key_pos % PAGE_SIZE
        else:
            page = tl.load(table + key_pos // PAGE_SIZE).to(tl.int64)
            slot = key_pos % PAGE_SIZE
        k_offset = page * k_stride_page + slot * k_stride_slot
        v_offset = page * v_stride_page + slot * v_stride_slot
        k_pointers = key_base + k_offset[None, :] + (dim * k_stride_dim)[:, None]
        v_pointers = value_base + v_offset[:, None] + (dim * v_stride_dim)[None, :]

        if MASKED:
            is_loaded = (key_pos >= low) & (key_pos < high)
            k = tl.load(k_pointers, is_loaded[None, :] & (dim < HEAD_SIZE)[:, None], other=0.0)
            v = tl.load(v_pointers, is_loaded[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
        elif HEAD_SIZE == PADDED_SIZE:
            k = tl.load(k_pointers)
            v = tl.load(v_pointers)
        else:
            k = tl.load(k_pointers, mask=(dim < HEAD_SIZE)[:, None], other=0.0)
            v = tl.load(v_pointers, mask=(dim < HEAD_SIZE)[None, :], other=0.0)

        s = _dot(q, k.to(q.dtype), tl.zeros([q.shape[0], BLOCK_N], tl.float32), UPCAST)
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1) saturates instead of overflowing
            x = s * (logit_scale / softcap)
            s = softcap * LOG2E_ * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E_ * x) + 1.0))
            to_log2 = 1.0
        else:
            to_log2 = logit_scale * LOG2E_
        if MASKED:
            is_seen = (key_pos[None, :] >= row_start[:, None]) & (
                key_pos[None, :] < row_stop[:, None]
            )
            s = tl.where(is_seen, s, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(s, 1) * to_log2)
        if MASKED:  # a row that has seen no key yet must not compute -inf - -inf
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            safe_max = new_max
        p = tl.exp2(s * to_log2 - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        acc = _dot(p.to(q.dtype), v.to(q.dtype), acc, UPCAST)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def canvas_attention_kernel(
    out, query, key_cache, value_cache, k_scale, v_scale, partial_acc, partial_max, partial_sum,
    query_start_loc, seq_lens, block_tables, bidirectional_from,
    scale, softcap, num_seqs, num_tokens,
    out_stride_token, out_stride_head, q_stride_token, q_stride_head,
    k_stride_page, k_stride_slot, k_stride_head, k_stride_dim,
    v_stride_page, v_stride_slot, v_stride_head, v_stride_dim, table_stride,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ANCHORED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, IS_BOOL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_MODE: tl.constexpr, SPLIT_ROWS: tl.constexpr, MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, PROGRAMS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row tile of one sequence and KV head. Grid: (row tiles, KV heads, split programs).

    out, query ``[num_tokens, num_heads, head_size]``; caches ``[num_pages, page_size, num_kv_heads,
    head_size]``; partial_acc ``[slots, num_tokens, num_heads, head_size]`` fp32, partial_max and
    partial_sum ``[slots, num_tokens, num_heads]`` fp32, used when SPLIT_MODE is not "none".
    Writes out, or its part of the partials, for the rows of this tile and nothing else.
    """
    # The last row tiles see most keys under a causal mask: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc, tile, num_seqs, GROUP, BLOCK_M)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    first_pair = (tile - query_start * GROUP // BLOCK_M - seq) * BLOCK_M
    num_pairs = query_len * GROUP
    if (first_pair >= num_pairs) | (seq_len == 0):
        return

    # Pairs beyond the span repeat the last one: they load valid memory and change no bound.
    pair = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pair < num_pairs
    pair = tl.minimum(pair, num_pairs - 1)
    row = pair // GROUP
    token = (query_start + row).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, PADDED_SIZE)
    is_dim = dim < HEAD_SIZE
    q = tl.load(
        query + (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :],
        mask=is_dim[None, :],
        other=0.0,
    )

    split_point = _split_point(bidirectional_from, seq, query_len, IS_BOOL)
    row_start, row_stop = _row_bounds(row, query_len, seq_len, split_point, WINDOW, ANCHORED)
    union_low, union_high = tl.min(row_start, 0), tl.max(row_stop, 0)
    common_low, common_high = tl.max(row_start, 0), tl.min(row_stop, 0)

    logit_scale = scale
    if HAS_K_SCALE:
        logit_scale = scale * tl.load(k_scale)
    table = block_tables + seq.to(tl.int64) * table_stride
    key_base = key_cache + kv_head.to(tl.int64) * k_stride_head
    value_base = value_cache + kv_head.to(tl.int64) * v_stride_head

    # Parts are cut at the same keys for every tile of the sequence, on multiples of BLOCK_N.
    if SPLIT_MODE == "none":
        num_splits = 1
        first_split = 0
        last_split = 1
        split_base = 0
        split_len = 0
    else:
        num_keys = visible_keys_on_device(query_len, seq_len, WINDOW)
        num_splits = num_splits_on_device(
            query_len, num_keys, GROUP, NUM_KV_HEADS, SPLIT_ROWS, MIN_KEYS, MAX_SPLITS, PROGRAMS
        )
        split_base = (seq_len - num_keys) // BLOCK_N * BLOCK_N
        split_len = tl.cdiv(tl.cdiv(seq_len - split_base, num_splits), BLOCK_N) * BLOCK_N
        if SPLIT_MODE == "serial":
            first_split = 0
            last_split = num_splits
        else:
            first_split = tl.program_id(2)
            last_split = tl.minimum(first_split + 1, num_splits)

    for split in range(first_split, last_split):
        if SPLIT_MODE == "none":
            low = union_low
            high = union_high
        else:
            low = tl.maximum(union_low, split_base + split * split_len)
            high = tl.minimum(union_high, split_base + (split + 1) * split_len)
        # Tiles [tile_low, tile_high) touch the range, [mid_low, mid_high) need no mask.
        tile_low = low // BLOCK_N
        tile_high = tl.where(high > low, tl.cdiv(high, BLOCK_N), tile_low)
        mid_low = tl.minimum(tl.cdiv(tl.maximum(common_low, low), BLOCK_N), tile_high)
        mid_high = tl.maximum(tl.minimum(common_high, high) // BLOCK_N, mid_low)
        mid_high = tl.minimum(mid_high, tile_high)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_SIZE], tl.float32)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, row_start, row_stop,
            mid_high - mid_low, mid_low, mid_high, 0, low, high,
            table, key_base, value_base,
            k_stride_page, k_stride_slot, k_stride_dim, v_stride_page, v_stride_slot, v_stride_dim,
            logit_scale, softcap, HEAD_SIZE, PADDED_SIZE, PAGE_SIZE, BLOCK_N, SOFTCAP, UPCAST,
            MASKED=False,
        )  # fmt: skip
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, row_start, row_stop,
            tile_high - tile_low - (mid_high - mid_low), tile_low, mid_low, mid_high - mid_low,
            low, high, table, key_base, value_base,
            k_stride_page, k_stride_slot, k_stride_dim, v_stride_page, v_stride_slot, v_stride_dim,
            logit_scale, softcap, HEAD_SIZE, PADDED_SIZE, PAGE_SIZE, BLOCK_N, SOFTCAP, UPCAST,
            MASKED=True,
        )  # fmt: skip

        is_final = is_pair
        which = tl.full([BLOCK_M], 0, tl.int32) + split
        if SPLIT_MODE != "none":
            slot = 0 if SPLIT_MODE == "serial" else split
            part = (slot * num_tokens + token) * (GROUP * NUM_KV_HEADS) + head
            acc_pointers = partial_acc + part[:, None] * HEAD_SIZE + dim[None, :]
            if SPLIT_MODE == "serial":
                # What this program wrote for the part before; other threads of it may have.
                tl.debug_barrier()
                has_before = is_pair & (which > 0)
                max_before = tl.load(partial_max + part, has_before, other=float("-inf"))
                sum_before = tl.load(partial_sum + part, has_before, other=0.0)
                acc_before = tl.load(acc_pointers, has_before[:, None] & is_dim[None, :], other=0.0)
                acc, row_max, row_sum = merge_parts(
                    acc_before, max_before, sum_before, acc, row_max, row_sum
                )
                tl.debug_barrier()
                last_part = num_splits - 1
            else:
                last_part = tl.where(num_splits == 1, 0, -1)  # the merge kernel is the last
            is_final = is_pair & (which == last_part)
            is_partial = is_pair & (which != last_part)
            tl.store(partial_max + part, row_max, is_partial)
            tl.store(partial_sum + part, row_sum, is_partial)
            tl.store(acc_pointers, acc, is_partial[:, None] & is_dim[None, :])

        result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        if HAS_V_SCALE:
            result *= tl.load(v_scale)
        tl.store(
            out + (token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=is_final[:, None] & is_dim[None, :],
        )


# False under TRITON_INTERPRET=1, which has to be set before Triton is imported.
_IS_COMPILED = isinstance(canvas_attention_kernel, triton.JITFunction)


@functools.lru_cache
def _capability_major(device: torch.device) -> int:
    """Major compute capability of a CUDA device; the table for Hopper where there is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def batch_shape(query: Tensor, cache: PagedKV, batch: RaggedBatch) -> BatchShape:
    """What the host knows about a call; the block tables' capacity bounds the sequence lengths."""
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


def default_plan(
    query: Tensor, cache: PagedKV, batch: RaggedBatch, options: AttentionOptions
) -> AttentionPlan:
    """The plan that `canvas_attention` takes when none is given: tiles from the committed table."""
    major = _capability_major(query.device)
    config = tile_config(query.shape[2], query.element_size(), major)
    return plan_attention(batch_shape(query, cache, batch), config, options.window)


def canvas_attention(
    query: Tensor,
    cache: PagedKV,
    batch: RaggedBatch,
    options: AttentionOptions,
    out: Tensor,
    plan: AttentionPlan | None = None,
    workspace: Tensor | None = None,
) -> AttentionPlan:
    """Write attention of a ragged batch over a paged cache into ``out``; returns the plan it took.

    query, out ``[num_tokens, num_heads, head_size]`` fp16, bf16 or fp32 (out must not alias query);
    the rest is described in `inputs`. A row that sees no key gets zeros. Padding tokens and
    sequences with seq_len 0 are left untouched. The K/V of the span itself must be in the cache
    already (`cache_write.write_kv`).

    workspace: fp32, at least ``plan.workspace_elements(shape)`` elements, overwritten; allocated
    here when None. Never waits for the device and may be captured in a CUDA graph.
    Raises ValueError for arguments that do not fit together, with both values.
    """
    check_inputs(query, cache, batch, out)
    shape = batch_shape(query, cache, batch)
    if plan is None:
        plan = default_plan(query, cache, batch, options)
    needed = plan.workspace_elements(shape)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} elements of {workspace.dtype}, "
            f"the plan needs {needed} of torch.float32"
        )
    if shape.num_tokens > 0 and shape.num_seqs > 0:
        _launch(query, cache, batch, options, out, plan, workspace)
    return plan


def _launch(
    query: Tensor,
    cache: PagedKV,
    batch: RaggedBatch,
    options: AttentionOptions,
    out: Tensor,
    plan: AttentionPlan,
    workspace: Tensor,
) -> None:
    """Launch the kernel, and the merge of the parts where the plan has one."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = cache.key.shape[2]
    group, config = num_heads // num_kv_heads, plan.config
    rows = plan.workspace_slots * num_tokens * num_heads
    partial_max, partial_sum = workspace[:rows], workspace[rows : 2 * rows]
    partial_acc = workspace[2 * rows :]
    window = options.window
    shared = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "PADDED_SIZE": max(16, next_power_of_2(head_size)),
        "WINDOW": window.size if window is not None else 0,
        "HAS_V_SCALE": cache.v_scale is not None,
        "SPLIT_ROWS": config.block_m,
        "MIN_KEYS": config.min_keys_per_split,
        "MAX_SPLITS": config.max_splits,
        "PROGRAMS": TARGET_PROGRAMS,
    }
    canvas_attention_kernel[(plan.num_row_tiles, num_kv_heads, plan.split_programs)](
        out, query, cache.key, cache.value, cache.k_scale, cache.v_scale,
        partial_acc, partial_max, partial_sum,
        batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.bidirectional_from,
        options.scale, options.logit_softcap, batch.num_seqs, num_tokens,
        *out.stride()[:2], *query.stride()[:2], *cache.key.stride(), *cache.value.stride(),
        batch.block_tables.stride(0),
        PAGE_SIZE=cache.page_size, ANCHORED=window is not None and window.kind == "anchored",
        SOFTCAP=options.logit_softcap > 0, HAS_K_SCALE=cache.k_scale is not None,
        IS_BOOL=batch.bidirectional_from.dtype == torch.bool,
        BLOCK_M=plan.block_m, BLOCK_N=config.block_n, SPLIT_MODE=plan.split_mode,
        UPCAST=query.dtype == torch.bfloat16 and not _IS_COMPILED,
        num_warps=config.num_warps, num_stages=config.num_stages, **shared,
    )  # fmt: skip
    if plan.split_mode == "parallel":
        merge_splits_kernel[(num_tokens, num_kv_heads)](
            out, cache.v_scale, partial_acc, partial_max, partial_sum,
            batch.query_start_loc, batch.seq_lens, batch.num_seqs, num_tokens, *out.stride()[:2],
            PADDED_GROUP=next_power_of_2(group), **shared,
        )  # fmt: skip
