"""The Triton kernels with which a request edits its logits, in numpy and torch.

They are for logit_bias, allowed_token_ids, min_tokens, penalties, bad_words and thinking budgets;
one more kernel names the tokens of prompt_logprobs. Diffusion models use them too, but for the
budgets (`dllm/engine/edits.py`). `batch` explains how these functions are written. Here

    logits                [N, V], one row for each position that is sampled; changed in place
    expanded_idx_mapping  [N], the slot of each logits row
    expanded_local_pos    [N], which of its request's rows (0, 1, ...) a logits row is. The rows of
                          a request are adjacent. Row 0 is for the position after the last sampled
                          token; row i comes after i draft tokens, which are the input ids of rows
                          1 to i
"""

import numpy as np
import torch

from dllm.attention.ragged import spread, starts_of


def _listed_ids(
    counts: torch.Tensor, table: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids that requests have listed: rows [n, 1], ids and is_real [n, longest list].

    counts: [max_num_reqs], table: [max_num_reqs, columns]; slots: [N], of the logits rows. Rows
    whose slot lists nothing are left out. A short list is filled up with its first id, where
    is_real is False, so that indexing with all ids is harmless.
    """
    num_ids = counts[slots]
    rows = num_ids.nonzero()
    width = int(num_ids.max()) if len(slots) else 0
    is_real = torch.arange(width) < num_ids[rows]
    ids = table[slots[rows[:, 0]], :width].long()
    return rows, torch.where(is_real, ids, ids[:, :1]), is_real


def _bias_kernel(
    logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Apply allowed_token_ids, logit_bias and min_tokens.

    With CHECK_ALL_MASKED_ROWS, a request may ask to get its stop tokens back when everything else
    is -inf, too.
    """
    logits, slots = logits_ptr, expanded_idx_mapping_ptr.long()
    rows, ids, _ = _listed_ids(num_allowed_token_ids_ptr, allowed_token_ids_ptr, slots)
    kept = logits[rows, ids]
    logits[rows[:, 0]] = -torch.inf
    logits[rows, ids] = kept

    rows, ids, is_real = _listed_ids(num_logit_bias_ptr, bias_token_ids_ptr, slots)
    bias = bias_ptr[slots[rows[:, 0]], : ids.shape[1]]
    bias = torch.where(is_real, bias, 0).to(logits.dtype)  # a repeated id must not count twice
    logits.index_put_((rows.expand_as(ids), ids), bias, accumulate=True)

    rows, ids, _ = _listed_ids(num_stop_token_ids_ptr, stop_token_ids_ptr, slots)
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
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor,
    vocab_size: int,
) -> None:
    """Apply the repetition penalty to tokens of prompt and output, the other two to the output's.

    output_bin_counts: [max_num_reqs, V] int32, how often each token is in the output.
    prompt_bin_mask: [max_num_reqs, ceil(V / 32)] int32, a bit for each token, lowest bit first. A
    row's output includes the drafts before it. Only the logits of these tokens are read and
    written, not whole rows.
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
        # -1 is no token: row 0 has no draft, and a missing draft has -1
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
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor,
) -> None:
    """A request that was preempted prefills its prompt and what it had generated, prefill_len
    tokens in all. Those behind prompt_len are counted as output.
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
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_offsets_ptr: torch.Tensor,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Set the token to -inf that would complete a bad word.

    A row's output includes the drafts before it, but not the prompt. bad_word_token_ids:
    [max_num_reqs, tokens], the words end to end; word i of a slot is [offsets[i], offsets[i + 1]).
    """
    row_slots = expanded_idx_mapping_ptr.numpy()
    num_words = num_bad_words_ptr.numpy()[row_slots]
    # From here on, arrays have an entry for each word of every row.
    rows, words = spread(starts_of(num_words))
    slots = row_slots[rows]
    offsets, tokens = bad_word_offsets_ptr.numpy(), bad_word_token_ids_ptr.numpy()
    starts, ends = offsets[slots, words], offsets[slots, words + 1]
    prefix_len = ends - starts - 1
    prompt_len = prompt_len_ptr.numpy()[slots]
    committed_len = total_len_ptr.numpy()[slots] - prompt_len
    local_pos = expanded_local_pos_ptr.numpy()[rows]
    # Where in the output the tokens start that are compared with the word's prefix.
    first = committed_len + local_pos - prefix_len
    is_completed = first >= 0
    # Token i of all prefixes at once. It is a sampled token, or a draft among the input ids.
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
) -> None:
    """The token that follows each query token: prompt_logprobs are about these."""
    slots = idx_mapping_ptr.numpy()
    spans = query_start_loc_ptr.numpy()[: len(slots) + 1]
    rows, offsets = spread(spans)
    all_token_ids = all_token_ids_ptr.numpy()
    following = num_computed_tokens_ptr.numpy()[slots[rows]] + offsets + 1
    # A prompt of max_model_len tokens has nothing after its end. vLLM drops that logprob later.
    following = np.minimum(following, all_token_ids.shape[1] - 1)
    out = prompt_logprobs_token_ids_ptr.numpy()
    out[spans[0] : spans[-1]] = all_token_ids[slots[rows], following]


def _last_place(text: np.ndarray, marker: np.ndarray) -> int:
    """-1 if nowhere."""
    if len(text) < len(marker):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(text, len(marker))
    return int(np.flatnonzero((windows == marker).all(1)).max(initial=-1))


def _update_committed_marker_cache_kernel() -> None:
    """Nothing: the next kernel reads whole texts, which takes a CPU microseconds."""


def _thinking_budget_kernel(
    logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    reasoning_end_token_ids_ptr: torch.Tensor,
) -> None:
    """Force the next token of the end of thoughts in rows that have used up their budget.

    A row's text includes the drafts before it. The forced end may be longer than the natural one.
    """
    begin, end = reasoning_start_token_ids_ptr.numpy(), natural_reasoning_end_token_ids_ptr.numpy()
    forced = reasoning_end_token_ids_ptr.numpy()
    slots = expanded_idx_mapping_ptr.long()
    budgets = thinking_token_budget_ptr[slots]
    for row in (budgets >= 0).nonzero()[:, 0].tolist():
        committed = all_token_ids_ptr[slots[row], : int(total_len_ptr[slots[row]])]
        drafts = input_ids_ptr[row - int(expanded_local_pos_ptr[row]) + 1 : row + 1]
        text = torch.cat([committed, drafts]).numpy()
        last = _last_place(text, begin)
        is_over = last < 0 or last <= _last_place(text, end)
        if is_over or len(text) - last - len(begin) < budgets[row]:
            continue
        lengths = range(min(len(forced) - 1, len(text)), 0, -1)
        written = next((n for n in lengths if (text[-n:] == forced[:n]).all()), 0)
        logits_ptr[row, forced[written]] = 1e9
