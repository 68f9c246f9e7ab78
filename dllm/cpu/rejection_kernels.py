"""The Triton kernels that accept, reject and replace draft tokens, in numpy.

Rows, drafts and `local_` buffers are laid out as draft_statistics.py says. Verification keeps a
request's drafts up to the first that it rejects, and the token after those is drawn anew: from the
target where all were accepted (the bonus token), else from what the target has more of than the
drafter. Sources: Leviathan et al. 2023 (arXiv 2211.17192), Sun et al. 2024 (arXiv 2403.10444).
"""

from collections.abc import Callable

import numpy as np
import torch

from dllm.cpu.draft_statistics import STATISTICS_KERNELS, Distributions
from dllm.cpu.gumbel import best_per_block, gumbel_noise, philox_uniform
from dllm.cpu.kernels import spread

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler."
_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."


def _flatten_sampled_kernel(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Put the first num_sampled tokens of each row of `sampled` at the start of its logits rows."""
    num_sampled = num_sampled_ptr.numpy()
    rows, offsets = spread(np.concatenate(([0], np.cumsum(num_sampled))))
    target = cu_num_logits_ptr.numpy()[rows] + offsets
    flat_sampled_ptr.numpy()[target] = sampled_ptr.numpy()[rows, offsets]


def _gather_draft_sampled_kernel(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the input token and position of every logits row; a draft inside the prompt becomes -1.

    Drafts follow a sampled token, so that what starts within the prompt is a placeholder.
    """
    tokens = logits_indices_ptr.numpy()[:num_logits]
    local_pos = expanded_local_pos_ptr.numpy()[:num_logits]
    positions = positions_ptr.numpy()[tokens]
    prefill_len = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    is_placeholder = (local_pos > 0) & (positions - local_pos < prefill_len)
    sampled = np.where(is_placeholder, -1, input_ids_ptr.numpy()[tokens])
    draft_sampled_ptr.numpy()[:num_logits] = sampled
    pos_ptr.numpy()[:num_logits] = positions


# --------------------------------------------------------------------------- verification


def _num_leading(flags: np.ndarray) -> int:
    """Count the true values before the first false one."""
    return int(np.append(flags, False).argmin())


def _best_tokens(local_max: torch.Tensor, local_argmax: torch.Tensor, rows: slice) -> np.ndarray:
    """Return the token with the largest value over all vocabulary blocks, for each of `rows`."""
    values, tokens = local_max.numpy()[rows], local_argmax.numpy()[rows]
    blocks = np.where(np.isnan(values), -np.inf, values).argmax(1)
    return tokens[np.arange(len(tokens)), blocks]


def _next_masses(
    log_p: np.ndarray, target: np.ndarray, local_residual_mass: np.ndarray | None
) -> np.ndarray:
    """Return the residual mass of every draft but the first, [n - 1].

    log_p, target: [n]. local_residual_mass: [n, blocks], None where the drafter put all its mass on
    the draft: then it is p_i * (1 - target).
    """
    if local_residual_mass is not None:
        return local_residual_mass[1:].sum(1)
    return np.exp(log_p[:-1]) * (np.float32(1) - np.exp(target[1:]))


def _num_kept_by_block(log_p: np.ndarray, next_masses: np.ndarray, uniform: np.ndarray) -> int:
    """Return how many drafts block verification keeps: through the last i with u_i <= h_i.

    log_p: [n], the joint ratio of the prefix that ends with draft i. next_masses: [n - 1], the
    residual mass of draft i + 1. h_i = mass / (mass + 1 - p_i), and p_i at the last draft.
    """
    h = np.exp(log_p)
    denominators = next_masses + np.float32(1) - h[:-1]
    with np.errstate(all="ignore"):
        h[:-1] = np.where(denominators > 0, next_masses / denominators, np.float32(1))
    kept = np.flatnonzero(uniform <= h)
    return int(kept[-1]) + 1 if len(kept) else 0


def _rejection_kernel(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    num_warps: int = 1,
) -> None:
    """Write how many drafts each row keeps, the tokens looked at, and the rejected one's logsumexp.

    Greedy rows keep drafts while they are the target's argmax, and end with that argmax; others
    keep them by ratio (target > u * draft) or by block. With SYNTHETIC_MODE a draft is kept at a
    given rate instead. sampled: [rows, steps + 1]; what no draft reaches stays unwritten.
    """
    distributions = Distributions.of(
        target_logits_ptr,
        (target_local_max_ptr, target_local_sumexp_ptr),
        draft_logits_ptr,
        (draft_local_max_ptr, draft_local_sumexp_ptr),
    )
    starts, is_greedy = cu_num_logits_ptr.tolist(), (temp_ptr == 0).tolist()
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        start, end = starts[row], starts[row + 1] - 1
        drafts = draft_sampled_ptr.numpy()[start + 1 : end + 1]
        if not is_greedy[slot]:
            drafts = drafts[: _num_leading(drafts >= 0)]  # a draft that is not there ends them
        rows = slice(start, start + len(drafts))
        uniform = philox_uniform(seed_ptr.numpy()[slot : slot + 1], pos_ptr.numpy()[rows])
        is_kept = None
        if synthetic_conditional_rates_ptr is not None:
            is_kept = uniform < synthetic_conditional_rates_ptr.numpy()[: len(drafts)]

        if is_greedy[slot]:
            best = _best_tokens(target_local_max_ptr, target_local_argmax_ptr, rows)
            is_kept = (best == drafts if is_kept is None else is_kept) & (drafts >= 0)
            num_kept = _num_leading(is_kept)
            tokens = np.where(is_kept, drafts, best)[: num_kept + 1]
            normalized_row = None
        elif cumulative_log_p_ptr is not None:
            target, _ = distributions.of_drafts(start, slot, temp_ptr[slot].item(), drafts)
            log_p, masses = cumulative_log_p_ptr.numpy()[rows], None
            if local_residual_mass_ptr is not None:
                masses = local_residual_mass_ptr.numpy()[rows]
            num_kept = _num_kept_by_block(log_p, _next_masses(log_p, target, masses), uniform)
            tokens = drafts
            normalized_row = start + num_kept if start + num_kept < end else None
        else:
            target, draft = distributions.of_drafts(start, slot, temp_ptr[slot].item(), drafts)
            num_kept = _num_leading(
                target > np.log(uniform) + draft if is_kept is None else is_kept
            )
            tokens = drafts[: num_kept + 1]
            normalized_row = start + len(tokens) - 1 if len(tokens) else None

        sampled_ptr.numpy()[row, : len(tokens)] = tokens
        rejected_steps_ptr[row] = num_kept
        target_lse, draft_lse = distributions.normalizers(normalized_row)
        target_rejected_logsumexp_ptr[row] = target_lse
        draft_rejected_logsumexp_ptr[row] = draft_lse


# --------------------------------------------------------------------------- resampling


def _residual(log_target: np.ndarray, log_draft: np.ndarray) -> np.ndarray:
    """Return log max(exp(log_target) - exp(log_draft), 0), stable where the two are close."""
    with np.errstate(all="ignore"):
        ratio = np.exp(log_draft - log_target)
        return np.where(ratio < 1, log_target + np.log1p(-ratio), np.float32(-np.inf))


def _resample_kernel(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Draw the token after each row's kept drafts, per vocabulary block.

    From the target's logits where there is no rejected draft, else from the residual. Greedy rows
    that rejected a draft already have their token and stay unwritten.
    """
    assert not WATERMARK, "watermarked verification has no CPU kernel"
    starts = cu_num_logits_ptr.tolist()
    for row, num_kept in enumerate(rejected_step_ptr.tolist()):
        logits_row = starts[row] + num_kept
        slot = int(expanded_idx_mapping_ptr[logits_row])
        temperature = np.float32(temp_ptr[slot].item())
        is_bonus = logits_row == starts[row + 1] - 1
        if temperature == 0 and not is_bonus:
            continue
        logits = target_logits_ptr[logits_row, :vocab_size].float().numpy()
        rejected = -1 if is_bonus else int(draft_sampled_ptr[logits_row + 1])
        if rejected >= 0 and draft_logits_ptr is None:
            logits = logits.copy()
            logits[rejected] = -np.inf
        elif rejected >= 0 and draft_logits_ptr is not None:
            target = logits - np.float32(target_rejected_logsumexp_ptr[row].item())
            if cumulative_log_p_ptr is not None and num_kept:
                target = target + np.float32(cumulative_log_p_ptr[logits_row - 1].item())
            draft = draft_logits_ptr[slot, num_kept, :vocab_size].float().numpy() / temperature
            logits = _residual(target, draft - np.float32(draft_rejected_logsumexp_ptr[row].item()))
        noise = None
        if temperature:
            seed, position = int(seed_ptr[slot]), int(pos_ptr[logits_row])
            noise = gumbel_noise(seed, position, vocab_size, USE_FP64)
        tokens, values = best_per_block(logits, noise, BLOCK_SIZE)
        resampled_local_argmax_ptr[row] = torch.from_numpy(tokens)
        resampled_local_max_ptr[row] = torch.from_numpy(values)


def _insert_resampled_kernel(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Put the token that was drawn after each row's kept drafts, and count it in num_sampled."""
    num_rows = len(cu_num_logits_ptr) - 1
    starts = cu_num_logits_ptr.numpy()
    num_sampled = num_sampled_ptr.numpy()
    logits_rows = starts[:-1] + num_sampled[:num_rows]
    is_bonus = logits_rows == starts[1:] - 1
    temperature = temp_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[logits_rows]]
    rows = np.flatnonzero(is_bonus | (temperature != 0))
    tokens = _best_tokens(resampled_local_max_ptr, resampled_local_argmax_ptr, slice(num_rows))
    sampled_ptr.numpy()[rows, num_sampled[rows]] = tokens[rows]
    num_sampled[:num_rows] += 1


REJECTION_KERNELS: dict[str, Callable[..., None]] = {
    _SAMPLER + "_flatten_sampled_kernel": _flatten_sampled_kernel,
    _SAMPLER + "_gather_draft_sampled_kernel": _gather_draft_sampled_kernel,
    _UTILS + "_rejection_kernel": _rejection_kernel,
    _UTILS + "_resample_kernel": _resample_kernel,
    _UTILS + "_insert_resampled_kernel": _insert_resampled_kernel,
    **STATISTICS_KERNELS,
}
