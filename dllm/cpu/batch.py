"""The Triton kernels that Model Runner V2 launches for every model, in numpy and torch.

This page explains how all modules of this package are written.

vLLM lets a platform replace a Triton kernel by a function (`KernelOverride` in
vllm/triton_utils/dispatcher.py). The function gets the arguments of the launch but not the launch
grid, so it reads every count from the shape of a tensor. Each function has the name of the kernel
that it replaces, and those of its parameters that it uses, by their names in vLLM 0.33; tests run
both and compare. What only shapes a launch (BLOCK_SIZE and the like) it does not use, nor strides,
because a tensor has its own (`kernels`).

Words in docstrings and parameters:

    row              index of a request in this step's batch
    slot             index of a request into the state that vLLM keeps; the same in every step
    idx_mapping      [rows], the slot of each row; -1 marks a row without state (padding)
    query_start_loc  [rows + 1], where each row's query span starts on the flat token axis
    group            index of a KV cache group: layers that share a block table

A docstring calls a parameter by its name without `_ptr`. What is not mentioned stays unwritten.
"""

import ctypes
import functools

import numpy as np
import torch

from dllm.attention.ragged import lengths, spread

NOTHING = torch.empty(0, dtype=torch.int32)  # in the place of what vLLM 0.32 does not pass


@functools.lru_cache(maxsize=64)  # the addresses are the same in every step
def _table_at(address: int, num_rows: int, num_columns: int) -> np.ndarray:
    """The memory at `address` as an int32 table, [num_rows, num_columns].

    vLLM passes the tables of all KV cache groups as one tensor of addresses, because their widths
    differ. The caller has to keep the memory allocated.
    """
    buffer = (ctypes.c_int32 * (num_rows * num_columns)).from_address(address)
    return np.frombuffer(memoryview(buffer), dtype=np.int32).reshape(num_rows, num_columns)


def _memory(address: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """``[length]``. The caller keeps the memory allocated."""
    buffer = (ctypes.c_byte * (length * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


# --------------------------------------------------------------------------- staged writes


def _apply_write_kernel(
    output_ptr: torch.Tensor,
    output_stride: int | torch.Tensor,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Copy write i to row `write_indices[i]`, from column `write_starts[i]` on; later writes win.

    write_contents: the contents of all writes end to end; write i ends at `write_cu_lens[i]`. With
    MULTI_GROUP, write i goes to table `write_group_ids[i]`, and `output` and `output_stride` are
    tensors that hold the address and the width of every table.
    """
    contents = write_contents_ptr.numpy()
    rows, starts = write_indices_ptr.tolist(), write_starts_ptr.tolist()
    ends = write_cu_lens_ptr.tolist()
    if MULTI_GROUP:
        assert isinstance(output_stride, torch.Tensor) and write_group_ids_ptr is not None
        widths = output_stride.tolist()
        tables = [
            _table_at(address, 1, (max(rows) + 1) * width)[0]
            for address, width in zip(output_ptr.tolist(), widths, strict=True)
        ]
        groups = write_group_ids_ptr.tolist()
    else:
        assert isinstance(output_stride, int)
        widths, tables, groups = [output_stride], [output_ptr.numpy().reshape(-1)], [0] * len(rows)

    begin = 0
    for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
        first = row * widths[group] + start
        tables[group][first : first + end - begin] = contents[begin:end]
        begin = end


# --------------------------------------------------------------------------- block tables


def _gather_block_tables_kernel(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_reqs: int,
    num_computed_tokens_ptr: torch.Tensor = NOTHING,
    sliding_window_reach_ptr: torch.Tensor = NOTHING,
    block_sizes_ptr: torch.Tensor = NOTHING,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the KV block ids of each row's slot to the row, and zero the rows after the last.

    num_blocks: [groups, max_num_reqs] int32, by slot; a row's entries after its last block stay as
    they are. MASK_SLIDING_WINDOW: pages that no query of the step sees become 0. They end more than
    sliding_window_reach[group] tokens (0: no window) below the row's first query.
    """
    slots = batch_idx_to_req_idx.tolist()
    num_blocks = num_blocks_ptr.numpy()
    max_num_reqs = num_blocks.shape[1]
    tables = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        strict=True,
    )
    for group, (source_address, target_address, width) in enumerate(tables):
        source = _table_at(source_address, max_num_reqs, width)
        target = _table_at(target_address, max_num_reqs, width)
        for row, (slot, count) in enumerate(zip(slots, num_blocks[group, slots], strict=True)):
            target[row, :count] = source[slot, :count]
        if MASK_SLIDING_WINDOW:
            reach, page_size = int(sliding_window_reach_ptr[group]), int(block_sizes_ptr[group])
            below = np.maximum(num_computed_tokens_ptr.numpy()[slots] - reach, 0) // page_size
            unseen = np.minimum(below, num_blocks[group, slots]) if reach > 0 else ()
            for row, count in enumerate(unseen):
                target[row, :count] = 0
        target[num_reqs:] = 0


def _compute_slot_mappings_kernel(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Write where each token's key and value go in the KV cache, and PAD_ID after the last token.

    slot_mappings: [groups, max_num_tokens] int64, block id * block size + offset in the block. (A
    "slot mapping" is about places in the KV cache, not about slots of requests.) Rows without
    state, and groups that are not enabled, get PAD_ID.
    """
    assert CP_SIZE == 1, f"context parallelism needs CUDA, but CP_SIZE is {CP_SIZE}"
    slots = idx_mapping.numpy()
    spans = query_start_loc.numpy()[: len(slots) + 1]
    first, last = spans[0], spans[-1]
    token_slots = slots.repeat(lengths(spans))
    is_real = token_slots >= 0

    out = slot_mappings_ptr.numpy()
    out[:, first:max_num_tokens] = PAD_ID
    if not is_real.any():
        return
    token_slots, positions = token_slots[is_real], pos.numpy()[first:last][is_real]
    num_slots = int(slots.max()) + 1
    tables = zip(
        slot_mapping_enabled.tolist(),
        block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        block_sizes.tolist(),
        strict=True,
    )
    for group, (enabled, address, width, block_size) in enumerate(tables):
        if enabled:
            places, offsets = np.divmod(positions, block_size)
            blocks = _table_at(address, num_slots, width)[token_slots, places].astype(np.int64)
            out[group, first:last][is_real] = blocks * block_size + offsets


def _zero_kv_blocks_kernel(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
) -> None:
    """Strides and sizes count words of 4 bytes."""
    segments = seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist()
    for address, stride, size in zip(*segments, strict=True):
        for block in block_ids_ptr.tolist():
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


# --------------------------------------------------------------------------- inputs of a step


def _prepare_prefill_inputs_kernel(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
) -> None:
    """Fill the query spans of rows whose prompt is not yet computed with tokens of that prompt.

    next_prefill_tokens: [num_lookahead, max_num_reqs], by slot: the prompt tokens that follow this
    chunk, 0 after the prompt's end.
    """
    input_ids, all_token_ids = input_ids_ptr.numpy(), all_token_ids_ptr.numpy()
    next_tokens = next_prefill_tokens_ptr.numpy()
    spans = query_start_loc_ptr.tolist()
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        prefill_len = int(prefill_lens_ptr[slot])
        num_computed = int(num_computed_tokens_ptr[slot])
        if num_computed >= prefill_len:
            continue
        start, end = spans[row], spans[row + 1]
        chunk_end = num_computed + end - start
        input_ids[start:end] = all_token_ids[slot, num_computed:chunk_end]
        upcoming = all_token_ids[slot, chunk_end : min(chunk_end + num_lookahead, prefill_len)]
        next_tokens[:num_lookahead, slot] = 0
        next_tokens[: len(upcoming), slot] = upcoming


def _prepare_pos_seq_lens_kernel(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """pos counts on from the tokens that the row has computed already.

    seq_lens: [max_num_reqs], computed tokens + query tokens of each row, 0 after the last row.
    """
    slots = idx_mapping_ptr.numpy()
    spans = query_start_loc_ptr.numpy()[: len(slots) + 1]
    num_computed = num_computed_tokens_ptr.numpy()[slots]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[: len(slots)] = num_computed + lengths(spans)
    seq_lens[len(slots) : max_num_reqs] = 0
    rows, offsets = spread(spans)
    pos_ptr.numpy()[spans[0] : spans[-1]] = num_computed[rows] + offsets


def _apply_prompt_embeds_kernel(
    inputs_embeds_ptr: torch.Tensor,
    embeds_ptrs_ptr: torch.Tensor,
    mask_ptrs_ptr: torch.Tensor,
    embeds_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
) -> None:
    """Write the embeddings that prompts were given as, in place of their tokens' embeddings.

    embeds_ptrs, mask_ptrs: by slot, addresses of embeddings [tokens, hidden], and of bytes [tokens]
    that say which of them are tokens after all; 0 for none.
    """
    spans, hidden = query_start_loc_ptr.tolist(), inputs_embeds_ptr.shape[1]
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        first, length = int(num_computed_tokens_ptr[slot]), int(embeds_lens_ptr[slot])
        last = min(first + spans[row + 1] - spans[row], length)
        if first >= last:
            continue
        given = _memory(int(embeds_ptrs_ptr[slot]), length * hidden, inputs_embeds_ptr.dtype)
        out = inputs_embeds_ptr[spans[row] : spans[row] + last - first]
        is_given = torch.ones(last - first, dtype=torch.bool)
        if mask := int(mask_ptrs_ptr[slot]):
            is_given = _memory(mask, length, torch.uint8)[first:last] == 0
        out[is_given] = given.view(length, hidden)[first:last][is_given]


def _combine_sampled_and_draft_tokens_kernel(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """End each generating row's query span with its last sampled token and its draft tokens.

    logits_indices: [num_logits], the flat index of every token that needs logits: of row i the last
    `cu_num_logits[i + 1] - cu_num_logits[i]` tokens. Input tokens of a row are left alone while its
    sequence is not longer than its prompt. A prompt's last token is never overwritten.
    """
    slots = idx_mapping_ptr.numpy()
    num_rows = len(slots)
    cu_num_logits = cu_num_logits_ptr.numpy()[: num_rows + 1]
    num_logits = lengths(cu_num_logits)
    logits_start = query_start_loc_ptr.numpy()[1 : num_rows + 1] - num_logits
    rows, offsets = spread(cu_num_logits)
    logits_indices = logits_start[rows] + offsets
    logits_indices_ptr.numpy()[cu_num_logits[0] : cu_num_logits[-1]] = logits_indices

    input_ids = input_ids_ptr.numpy()
    seq_lens = seq_lens_ptr.numpy()[:num_rows]
    prefill_lens = prefill_len_ptr.numpy()[slots]
    is_generating = seq_lens > prefill_lens
    if NUM_NEW_SAMPLED_TOKENS:
        takes_sampled = is_generating & (seq_lens - num_logits >= prefill_lens)
        last_sampled = last_sampled_tokens_ptr.numpy().reshape(-1)
        input_ids[logits_start[takes_sampled]] = last_sampled[slots[takes_sampled]]
    is_draft = is_generating[rows] & (offsets >= NUM_NEW_SAMPLED_TOKENS)
    if is_draft.any():
        input_ids[logits_indices[is_draft]] = draft_tokens_ptr.numpy()[
            slots[rows[is_draft]], offsets[is_draft] - NUM_NEW_SAMPLED_TOKENS
        ]


def _expand_idx_mapping_kernel(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """Write the slot of every logits row, and its place among that request's logits rows."""
    slots = idx_mapping_ptr.numpy()
    spans = cu_num_logits_ptr.numpy()[: len(slots) + 1]
    rows, offsets = spread(spans)
    expanded_idx_mapping_ptr.numpy()[spans[0] : spans[-1]] = slots[rows]
    expanded_local_pos_ptr.numpy()[spans[0] : spans[-1]] = offsets


# --------------------------------------------------------------------------- after a step


def _post_update_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    sampled_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor | None = None,
    draft_tokens_out_ptr: torch.Tensor | None = None,
) -> None:
    """Append each row's sampled tokens to its request, and advance its computed tokens.

    num_computed_tokens grows by query_len - num_rejected. The first num_sampled[row] tokens of
    sampled_tokens, [rows, width], are added. Rows with a negative slot are skipped.
    """
    rows = np.flatnonzero(idx_mapping_ptr.numpy() >= 0)
    slots = idx_mapping_ptr.numpy()[rows]
    if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
        draft_tokens_out_ptr.numpy()[slots] = draft_tokens_ptr.numpy()[rows]
    num_computed = num_computed_tokens_ptr.numpy()
    num_computed[slots] -= num_rejected_ptr.numpy()[rows]
    if query_start_loc_ptr is not None:
        num_computed[slots] += lengths(query_start_loc_ptr.numpy())[rows]

    num_sampled, sampled = num_sampled_ptr.numpy()[rows], sampled_tokens_ptr.numpy()[rows]
    # One entry per token from here on, in order: of several writes to a place the last one stays.
    rows, offsets = (np.arange(sampled.shape[1]) < num_sampled[:, None]).nonzero()
    tokens, token_slots, total_len = sampled[rows, offsets], slots[rows], total_len_ptr.numpy()
    all_token_ids_ptr.numpy()[token_slots, total_len[token_slots] + offsets] = tokens
    last_sampled_tokens_ptr.numpy().reshape(-1)[token_slots] = tokens
    total_len[slots] += num_sampled
    if output_bin_counts_ptr is not None:
        np.add.at(output_bin_counts_ptr.numpy(), (token_slots, tokens), 1)


def _post_update_num_computed_tokens_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
) -> None:
    slots = idx_mapping_ptr.numpy()
    spans = query_start_loc_ptr.numpy()[: len(slots) + 1]
    num_computed_tokens_ptr.numpy()[slots] += lengths(spans)
