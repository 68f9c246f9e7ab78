"""Splitting the keys of long sequences into parts, and merging the results (on the device).

`planning.py` says why and into how many parts; the functions ``..._on_device`` compute the same.
The programs of part p leave three fp32 results for each row and head:

    max_p = max_k s_k,   sum_p = sum_k 2^(s_k - max_p),   acc_p = sum_k 2^(s_k - max_p) v_k

over the keys k of the part, where s_k are logits times log2(e). `merge_splits_kernel` joins the
parts from left to right,

    max = max(max_a, max_b),  x = 2^(max_a - max) x_a + 2^(max_b - max) x_b   for x = acc, sum

so how sums are rounded depends only on where the keys are cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Parameters that change from step to step: none of them may compile a kernel again.
CHANGING = ["num_seqs", "num_partial_rows", "partial_rows_per_seq", "max_splits"]
ANY_ALIGNMENT = ["partial_max", "partial_sum"]


@triton.jit
def num_splits_on_device(
    query_len, num_keys, max_splits, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, MIN_KEYS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """max_splits: what the workspace has room for; a sequence that is longer than the host believes
    has fewer parts, and no other memory is written.
    """
    programs = tl.maximum(tl.cdiv(query_len * GROUP, SPLIT_ROWS) * (NUM_KV_HEADS * VALUE_BLOCKS), 1)
    by_keys = tl.cdiv(num_keys, MIN_KEYS)
    return tl.maximum(tl.minimum(tl.minimum(by_keys, max_splits), PROGRAMS // programs), 1)


@triton.jit
def visible_keys_on_device(query_len, seq_len, WINDOW: tl.constexpr):
    if WINDOW > 0:
        num_keys = tl.minimum(seq_len, query_len + WINDOW - 1)
    else:
        num_keys = seq_len
    return num_keys


@triton.jit
def partial_row_on_device(seq, row, token, rows_per_seq):
    """On the workspace's row axis: ``token``, or with rows_per_seq a row of the sequence's own."""
    in_span = seq.to(tl.int64) * rows_per_seq + row
    return tl.where(rows_per_seq > 0, in_span, token.to(tl.int64))


@triton.jit
def merge_parts(acc_a, max_a, sum_a, acc_b, max_b, sum_b):
    """a's keys come before b's; acc ``[rows, columns]`` is not divided by the sum, max and sum
    ``[rows]``.

    Written as fma, so that the compiler cannot choose between one rounding and two. A part without
    keys has max -inf and contributes exact zeros.
    """
    new_max = tl.maximum(max_a, max_b)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    weight_a = tl.exp2(max_a - safe_max)
    weight_b = tl.exp2(max_b - safe_max)
    new_sum = tl.fma(sum_b, weight_b, sum_a * weight_a)
    new_acc = tl.fma(acc_b, weight_b[:, None], acc_a * weight_a[:, None])
    return new_acc, new_max, new_sum


@triton.jit
def _find_token(query_start_loc, token, num_seqs):
    """The sequence whose span holds ``token`` (the last one for padding tokens)."""
    low: tl.int32 = 0
    high = num_seqs
    while low < high:
        mid = (low + high) // 2
        if tl.load(query_start_loc + mid) <= token:
            low = mid + 1
        else:
            high = mid
    return low - 1


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def merge_splits_kernel(
    out, v_scale, partial_acc, partial_max, partial_sum, query_start_loc, seq_lens,
    num_seqs, num_partial_rows, partial_rows_per_seq, max_splits,
    out_stride_token, out_stride_head,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, VALUE_BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, PADDED_GROUP: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    MIN_KEYS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one token and KV head, in order. Grid: (num_tokens, KV heads).

    For sequences that were not split `canvas_attention_kernel` has written ``out``.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_token(query_start_loc, index, num_seqs)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    num_splits = num_splits_on_device(
        query_len, visible_keys_on_device(query_len, seq_len, WINDOW), max_splits,
        GROUP, NUM_KV_HEADS, VALUE_BLOCKS, SPLIT_ROWS, MIN_KEYS, PROGRAMS,
    )  # fmt: skip
    is_padding = index >= tl.load(query_start_loc + num_seqs)
    if is_padding | (seq_len == 0) | (num_splits == 1):
        return

    token = index.to(tl.int64)
    row = partial_row_on_device(seq, index - query_start, token, partial_rows_per_seq)
    in_group = tl.arange(0, PADDED_GROUP)
    is_head = in_group < GROUP
    head = kv_head * GROUP + in_group
    dim = tl.arange(0, PADDED_SIZE)
    mask = is_head[:, None] & (dim < HEAD_SIZE)[None, :]
    row_max = tl.full([PADDED_GROUP], float("-inf"), tl.float32)  # [heads of the group]
    row_sum = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, PADDED_SIZE], tl.float32)  # [heads of the group, head size]
    for split in range(num_splits):
        part = (split * num_partial_rows + row) * (GROUP * NUM_KV_HEADS) + head
        part_max = tl.load(partial_max + part, is_head, other=float("-inf"))
        part_sum = tl.load(partial_sum + part, is_head, other=0.0)
        part_acc = tl.load(partial_acc + part[:, None] * HEAD_SIZE + dim[None, :], mask, other=0.0)
        acc, row_max, row_sum = merge_parts(acc, row_max, row_sum, part_acc, part_max, part_sum)

    # A row that saw no key has sum 0 and acc 0: its output is 0.
    result = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    if HAS_V_SCALE:
        result *= tl.load(v_scale)
    pointers = out + token * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask)
