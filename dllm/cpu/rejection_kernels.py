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


def _accept_by_block(
    log_p: np.ndarray, next_mass: np.ndarray, uniform: np.ndarray
) -> int:
    """Return how many drafts block verification keeps: the last i with u_i <= h_i, plus one.

    log_p: [n], of the prefix that ends with draft i. next_mass: [n], the residual mass of the
    draft after i, NaN after the last.
    """
    p = np.exp(log_p)
    denominator = next_mass + np.float32(1) - p
    with np.errstate(all="ignore"):
        h = np.where(denominator > 0, next_mass / denominator, np.float32(1))
    accepted = np.flatnonzero(uniform <= np.where(np.isnan(next_mass), p, h))
    return int(accepted[-1]) + 1 if len(accepted) else 0


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
    slots, starts = idx_mapping_ptr.tolist(), cu_num_logits_ptr.tolist()
    for row, slot in enumerate(slots):
        start, end = starts[row], starts[row + 1] - 1
        drafts = draft_sampled_ptr.numpy()[start + 1 : end + 1].astype(np.int64)
        is_there = drafts >= 0
        uniform = philox_uniform(seed_ptr.numpy()[[slot]], pos_ptr.numpy()[start:end])
        temperature = np.float32(temp_ptr[slot].item())
        rates = synthetic_conditional_rates_ptr
        is_lucky = uniform < rates.numpy()[: len(drafts)] if rates is not None else None
        lse_row: int | None = None

        if temperature == 0:
            best = _best_tokens(target_local_max_ptr, target_local_argmax_ptr, start, end)
            is_kept = is_there & (is_lucky if is_lucky is not None else best == drafts)
            num_kept = _num_leading(is_kept)
            tokens = np.where(is_kept, drafts, best)[: num_kept + 1]
        elif USE_BLOCK_VERIFICATION:
            ...
