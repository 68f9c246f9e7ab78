"""The Triton kernels with which a request edits its logits, and asks for those of its prompt.

Any model reaches them, a diffusion model too (`dllm/engine/edits.py`). Conventions as in `batch`,
and here

    logits               [N, V], one row per sampled position; changed in place
    expanded_idx_mapping [N], logits row -> slot
    expanded_local_pos   [N], place of a logits row among its request's rows, which are adjacent;
                         row i > 0 of a request is conditioned on its drafts 1..i, which are the
                         input ids of those rows
"""

from collections.abc import Callable

import numpy as np
import torch

_SAMPLE = "vllm.v1.worker.gpu.sample."


def _own_ids(
    counts: torch.Tensor, table: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits rows whose slots list ids: rows [n, 1], ids [n, longest], and which are real.

    A short list is filled up by repeating its first id.
    """
    num_ids = counts[slots]
    rows = num_ids.nonzero()
    width = int(num_ids.max()) if len(slots) else 0
    is_real = torch.arange(width) < num_ids[rows]
    ids = table[slots[rows[:, 0]], :width].long()
    return rows, torch.where(is_real, ids, ids[:, :1]), is_real


def _bias_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep only a row's allowed tokens, add its biases, and mask its stop tokens until min_len.

    With CHECK_ALL_MASKED_ROWS, a slot that asks for it gets its stop tokens back when nothing else
    is left.
    """
    logits, slots = logits_ptr, expanded_idx_mapping_ptr.long()
    rows, ids, _ = _own_ids(num_allowed_token_ids_ptr, allowed_token_ids_ptr, slots)
    kept = logits[rows, ids]
    logits[rows[:, 0]] = -torch.inf
    logits[rows, ids] = kept

    rows, ids, is_real = _own_ids(num_logit_bias_ptr, bias_token_ids_ptr, slots)
    bias = bias_ptr[slots[rows[:, 0]], : ids.shape[1]]
    bias = torch.where(is_real, bias, 0).to(logits.dtype)
    logits.index_put_((rows.expand_as(ids), ids), bias, accumulate=True)

    rows, ids, _ = _own_ids(num_stop_token_ids_ptr, stop_token_ids_ptr, slots)
    is_early = pos_ptr[rows[:, 0]] + 1 < min_lens_ptr[slots[rows[:, 0]]]
    rows, ids = rows[is_early], ids[is_early]
    before = logits[rows, ids]
    logits[rows, ids] = -torch.inf
    if CHECK_ALL_MASKED_ROWS:
        wants_back = restore_when_all_masked_ptr[slots[rows[:, 0]]].bool()
        is_empty = wants_back & (logits[rows[:, 0]] == -torch.inf).all(1)
        restored = before.where(before.isfinite(), -torch.inf)
        logits[rows[is_empty], ids[is_empty]] = restored[is_empty]


def _penalties_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Penalize the tokens of each row's prompt (repetition) and output (all three penalties).

    output_bin_counts: [max_num_reqs, V] int32. prompt_bin_mask: [max_num_reqs, ceil(V / 32)] int32,
    lowest bit first. A row's output includes the drafts before it. Only the tokens that a request
    has are read and written.
    """
    repetition, frequency, presence = (
        penalty.numpy()
        for penalty in (repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr)
    )
    slots = expanded_idx_mapping_ptr.numpy()
    is_penalized = (repetition != 1) | (frequency != 0) | (presence != 0)
    for slot in np.unique(slots[is_penalized[slots]]):
        rows = np.flatnonzero(slots == slot)
        drafts = np.where(expanded_local_pos_ptr.numpy()[rows] > 0, token_ids_ptr.numpy()[rows], -1)
        counts = output_bin_counts_ptr[slot, :vocab_size].numpy()
        prompt = np.zeros(0, dtype=np.int64)
        if repetition[slot] != 1:
            packed = prompt_bin_mask_ptr[slot].numpy().view(np.uint8)
            prompt = np.flatnonzero(np.unpackbits(packed, count=vocab_size, bitorder="little"))
        # -1 stands for a draft that is not there
        tokens = np.unique(np.concatenate([np.flatnonzero(counts), prompt, drafts[drafts >= 0]]))
        counts = counts[tokens] + np.cumsum(drafts[:, None] == tokens, axis=0)
        is_output = counts > 0

        cells = torch.from_numpy(rows)[:, None], torch.from_numpy(tokens)
        logits = logits_ptr[cells].float().numpy()
        if repetition[slot] != 1:
            scale = np.where(np.isin(tokens, prompt) | is_output, repetition[slot], np.float32(1))
            logits = logits * np.where(logits > 0, 1 / scale, scale)
        logits = logits - frequency[slot] * counts.astype(np.float32) - presence[slot] * is_output
        logits_ptr[cells] = torch.from_numpy(logits).to(logits_ptr.dtype)


def _bincount_kernel(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Add the prompt to each slot's prompt mask and the rest of its prefill to its output counts.

    What was generated before a preemption is prefilled again but is output, not prompt.
    """
    all_token_ids, masks = all_token_ids_ptr.numpy(), prompt_bin_mask_ptr.numpy()
    counts = output_bin_counts_ptr.numpy()
    for slot in expanded_idx_mapping_ptr.tolist():
        prompt_len, prefill_len = int(prompt_len_ptr[slot]), int(prefill_len_ptr[slot])
        is_prompt = np.zeros(masks.shape[1] * 32, dtype=bool)
        is_prompt[all_token_ids[slot, :prompt_len]] = True
        masks[slot] |= np.packbits(is_prompt, bitorder="little").view(np.int32)
        np.add.at(counts[slot], all_token_ids[slot, prompt_len:prefill_len], 1)


def _bad_words_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Mask the last token of every bad word whose other tokens end the row's output so far.

    bad_word_token_ids: [max_num_reqs, tokens], the words end to end; word i of a slot is
    [offsets[i], offsets[i + 1]). A row's output includes the drafts before it, not the prompt.
    """
    row_slots = expanded_idx_mapping_ptr.numpy()
    num_words = num_bad_words_ptr.numpy()[row_slots]
    # One entry per word of every row from here on.
    rows = np.repeat(np.arange(len(row_slots)), num_words)
    words = np.arange(len(rows)) - np.repeat(np.cumsum(num_words) - num_words, num_words)
    slots = row_slots[rows]
    offsets, tokens = bad_word_offsets_ptr.numpy(), bad_word_token_ids_ptr.numpy()
    starts, ends = offsets[slots, words], offsets[slots, words + 1]
    prefix_len = ends - starts - 1
    prompt_len = prompt_len_ptr.numpy()[slots]
    committed_len = total_len_ptr.numpy()[slots] - prompt_len
    local_pos = expanded_local_pos_ptr.numpy()[rows]
    first = committed_len + local_pos - prefix_len  # of the output tokens compared with the prefix
    is_completed = first >= 0
    for i in range(int(prefix_len.max(initial=0))):
        is_compared = is_completed & (i < prefix_len)
        is_draft = is_compared & (first + i >= committed_len)
        draft_rows = np.where(is_draft, rows - local_pos + first + i - committed_len + 1, 0)
        places = np.where(is_compared & ~is_draft, prompt_len + first + i, 0)
        committed = all_token_ids_ptr.numpy()[slots, places]
        actual = np.where(is_draft, input_ids_ptr.numpy()[draft_rows], committed)
        expected = tokens[slots, np.minimum(starts + i, ends - 1)]
        is_completed &= ~is_compared | (actual == expected)
    last = tokens[slots, ends - 1]
    logits_ptr[rows[is_completed], last[is_completed]] = -torch.inf


def _prompt_logprobs_token_ids_kernel(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Name the token after each query token: what the prompt's logprobs are about."""
    slots = idx_mapping_ptr.numpy()
    spans = query_start_loc_ptr.numpy()[: len(slots) + 1]
    query_lens = np.diff(spans)
    all_token_ids = all_token_ids_ptr.numpy()
    next_place = np.repeat(num_computed_tokens_ptr.numpy()[slots] + 1 - spans[:-1], query_lens)
    target = next_place + np.arange(spans[0], spans[-1])
    # A prompt of max_model_len has nothing after its end; that logprob is dropped later.
    target = np.minimum(target, all_token_ids.shape[1] - 1)
    prompt_logprobs_token_ids_ptr.numpy()[spans[0] : spans[-1]] = all_token_ids[
        np.repeat(slots, query_lens), target
    ]


LOGIT_EDIT_KERNELS: dict[str, Callable[..., None]] = {
    _SAMPLE + "penalties._penalties_kernel": _penalties_kernel,
    _SAMPLE + "penalties._bincount_kernel": _bincount_kernel,
    _SAMPLE + "logit_bias._bias_kernel": _bias_kernel,
    _SAMPLE + "bad_words._bad_words_kernel": _bad_words_kernel,
    _SAMPLE + "prompt_logprob._prompt_logprobs_token_ids_kernel": (
        _prompt_logprobs_token_ids_kernel
    ),
}
