"""The Triton kernels of vLLM's sampler for autoregressive models, in numpy and torch.

A diffusion model has its own sampler and never launches them, so they are opt-in: `install(...,
include_sampling=True)` for a worker that serves an autoregressive model or a drafter. Conventions
as in kernels.py, and here

    logits               [N, V], one row per sampled position; changed in place
    expanded_idx_mapping [N], logits row -> slot
    expanded_local_pos   [N], place of a logits row among its request's rows; row i > 0 of a request
                         is conditioned on its drafts 1..i, which are the input ids of those rows
"""

from itertools import pairwise

import numpy as np
import torch

from dllm.cpu.dflash_kernels import DFLASH_KERNELS
from dllm.cpu.gumbel import DRAFT_NOISE_SALT, best_per_block, gumbel_noise
from dllm.cpu.kernels import Kernel, spread
from dllm.cpu.rejection_kernels import REJECTION_KERNELS

_GPU = "vllm.v1.worker.gpu."


# --------------------------------------------------------------------------- sampling


def _gumbel_sample_kernel(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Sample one token per logits row (the largest one at temperature 0), per vocabulary block.

    local_argmax, local_max: [N, blocks]. logits_cache [max_num_reqs, columns, V], unless None,
    keeps the logits before temperature. Rows with a negative slot are padding: they are not cached
    and count as temperature 0.
    """
    positions = pos_ptr.tolist()
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        temperature = np.float32(temp_ptr[slot].item() if slot >= 0 else 0)
        if slot >= 0 and logits_cache_ptr is not None:
            assert logits_cache_col_ptr is not None and logits_cache_source_ptr is not None
            column = int(logits_cache_col_ptr.view(-1)[row if PER_TOKEN_COL else 0])
            logits_cache_ptr[slot, column, :vocab_size] = logits_cache_source_ptr[row]
        logits, noise = logits_ptr[row].float().numpy(), None
        if temperature:
            if APPLY_TEMPERATURE:
                logits = logits / temperature
            position = positions[row] + DRAFT_NOISE_SALT * IS_DRAFTING
            noise = gumbel_noise(int(seeds_ptr[slot]), position, vocab_size, USE_FP64)
        tokens, values = best_per_block(logits, noise, BLOCK_SIZE)
        local_argmax_ptr[row] = torch.from_numpy(tokens)
        local_max_ptr[row] = torch.from_numpy(values)


# --------------------------------------------------------------------------- shaping the logits


def _temperature_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide every logits row by its request's temperature; 0 means greedy and divides nothing."""
    temperature = temperature_ptr[expanded_idx_mapping_ptr].float()
    temperature.masked_fill_(temperature == 0, 1)
    logits_ptr.div_(temperature.unsqueeze(1))


def _min_p_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Mask the tokens less likely than min_p times the likeliest; min_p 0 masks nothing."""
    log_min_p = min_p_ptr[expanded_idx_mapping_ptr].float().log()
    threshold = logits_ptr.amax(1).float() + log_min_p
    logits_ptr.masked_fill_(logits_ptr < threshold.unsqueeze(1), -torch.inf)


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
    lowest bit first. A row's output includes the drafts before it.
    """
    repetition, frequency, presence = (
        penalty.numpy()
        for penalty in (repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr)
    )
    token_ids, local_pos = token_ids_ptr.numpy(), expanded_local_pos_ptr.tolist()
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        if repetition[slot] == 1 and frequency[slot] == 0 and presence[slot] == 0:
            continue
        drafts = token_ids[row - local_pos[row] + 1 : row + 1]
        counts = output_bin_counts_ptr[slot, :vocab_size].numpy().astype(np.float32)
        np.add.at(counts, drafts[drafts >= 0], 1)  # -1 stands for a draft that is not there
        is_output = counts > 0

        logits = logits_ptr[row].float().numpy()
        if repetition[slot] != 1:
            packed = prompt_bin_mask_ptr[slot].numpy().view(np.uint8)
            is_prompt = np.unpackbits(packed, count=vocab_size, bitorder="little").astype(bool)
            scale = np.where(is_prompt | is_output, repetition[slot], np.float32(1))
            logits = logits * np.where(logits > 0, 1 / scale, scale)
        logits = logits - frequency[slot] * counts - presence[slot] * is_output
        logits_ptr[row] = torch.from_numpy(logits)


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
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        logits = logits_ptr[row]
        if num_allowed := int(num_allowed_token_ids_ptr[slot]):
            allowed = allowed_token_ids_ptr[slot, :num_allowed]
            kept = logits[allowed]
            logits.fill_(-torch.inf)
            logits[allowed] = kept
        if num_biased := int(num_logit_bias_ptr[slot]):
            biased = bias_token_ids_ptr[slot, :num_biased]
            logits[biased] += bias_ptr[slot, :num_biased].to(logits.dtype)
        num_stop = int(num_stop_token_ids_ptr[slot])
        if not num_stop or int(pos_ptr[row]) + 1 >= int(min_lens_ptr[slot]):
            continue
        stop = stop_token_ids_ptr[slot, :num_stop]
        before = logits[stop]
        logits[stop] = -torch.inf
        can_restore = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked_ptr[slot])
        if can_restore and logits.max() == -torch.inf:
            logits[stop] = before.where(before.isfinite(), -torch.inf)


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
    all_token_ids, input_ids = all_token_ids_ptr.numpy(), input_ids_ptr.numpy()
    local_pos = expanded_local_pos_ptr.tolist()
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        num_words = int(num_bad_words_ptr[slot])
        if not num_words:
            continue
        drafts = input_ids[row - local_pos[row] + 1 : row + 1]
        committed = all_token_ids[slot, int(prompt_len_ptr[slot]) : int(total_len_ptr[slot])]
        output = [*committed.tolist(), *drafts.tolist()]
        tokens = bad_word_token_ids_ptr[slot].tolist()
        offsets = bad_word_offsets_ptr[slot, : num_words + 1].tolist()
        for start, end in pairwise(offsets):
            *prefix, last = tokens[start:end]
            if not prefix or output[-len(prefix) :] == prefix:
                logits_ptr[row, last] = -torch.inf


# --------------------------------------------------------------------------- counting


def _get_num_sampled_and_rejected_kernel(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Set num_rejected to logits rows - num_sampled; rows in mid-prompt get 0 for both."""
    slots = idx_mapping_ptr.numpy()
    num_rows = len(slots)
    is_done = seq_lens_ptr.numpy()[:num_rows] >= prefill_len_ptr.numpy()[slots]
    num_sampled, num_rejected = num_sampled_ptr.numpy(), num_rejected_ptr.numpy()
    num_sampled[:num_rows] *= is_done
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: num_rows + 1])
    num_rejected[:num_rows] = (num_logits - num_sampled[:num_rows]) * is_done


def _num_nans_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    num_nans_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Count the NaNs of each logits row."""
    num_nans_ptr.copy_(logits_ptr.isnan().sum(1))


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
    rows, offsets = spread(spans)
    all_token_ids = all_token_ids_ptr.numpy()
    target = num_computed_tokens_ptr.numpy()[slots[rows]] + 1 + offsets
    # A prompt of max_model_len has nothing after its end; that logprob is dropped later.
    target = np.minimum(target, all_token_ids.shape[1] - 1)
    prompt_logprobs_token_ids_ptr.numpy()[spans[0] : spans[-1]] = all_token_ids[slots[rows], target]


SAMPLING_KERNELS: dict[str, Kernel] = {
    _GPU + "input_batch._get_num_sampled_and_rejected_kernel": _get_num_sampled_and_rejected_kernel,
    _GPU + "metrics.logits._num_nans_kernel": _num_nans_kernel,
    _GPU + "sample.gumbel._gumbel_sample_kernel": _gumbel_sample_kernel,
    _GPU + "sample.gumbel._temperature_kernel": _temperature_kernel,
    _GPU + "sample.min_p._min_p_kernel": _min_p_kernel,
    _GPU + "sample.penalties._penalties_kernel": _penalties_kernel,
    _GPU + "sample.penalties._bincount_kernel": _bincount_kernel,
    _GPU + "sample.logit_bias._bias_kernel": _bias_kernel,
    _GPU + "sample.bad_words._bad_words_kernel": _bad_words_kernel,
    _GPU + "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        _prompt_logprobs_token_ids_kernel
    ),
    **REJECTION_KERNELS,
    **DFLASH_KERNELS,
}
