"""The Triton kernels that reduce logits for the verification of draft tokens, in numpy.

Conventions as in kernels.py. A request with n drafts has n + 1 logits rows, and `cu_num_logits`
says where they start:

    draft i (from 0)     draft_sampled[start + i + 1]; -1 stands for a draft that is not there
    its target logits    target_logits[start + i]      [num_logits, V], temperature applied
    its draft logits     draft_logits[slot, i]         [max_num_reqs, steps, V], before temperature;
                         None means that the drafter put all its mass on the draft
    the bonus token      target_logits[start + n]

The kernels hand over `local_` buffers with one column per vocabulary block: its max, its argmax and
its sum of exp(logit - max).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dllm.cpu.gumbel import best_per_block, vocab_blocks

_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."


def _max_and_sumexp(logits: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return max and sum of exp(logit - max) of [rows, V], [rows, blocks]; sum 0 if all -inf."""
    blocks = vocab_blocks(logits, block_size)
    maxima = blocks.max(-1)
    finite = np.where(maxima > -np.inf, maxima, np.float32(0))
    return maxima, np.exp(blocks - finite[..., None]).sum(-1)


def _logsumexp(local_max: torch.Tensor, local_sumexp: torch.Tensor) -> np.ndarray:
    """Join the blocks of every logits row, [num_logits]; rows never written give any value."""
    maxima, sumexps = local_max.numpy(), local_sumexp.numpy()
    total = maxima.max(1)
    with np.errstate(all="ignore"):
        return total + np.log((sumexps * np.exp(maxima - total[:, None])).sum(1))


@dataclass(frozen=True)
class Distributions:
    """Log-probabilities of the target and the drafter, from logits and their normalizers."""

    target_logits: torch.Tensor
    target_lse: np.ndarray
    draft_logits: torch.Tensor | None
    draft_lse: np.ndarray

    @classmethod
    def of(
        cls,
        target_logits: torch.Tensor,
        target_blocks: tuple[torch.Tensor, torch.Tensor],
        draft_logits: torch.Tensor | None,
        draft_blocks: tuple[torch.Tensor, torch.Tensor],
    ) -> "Distributions":
        """Join the (max, sumexp) blocks; a drafter without logits has log-probability 0."""
        target_lse = _logsumexp(*target_blocks)
        draft_lse = np.zeros_like(target_lse)
        if draft_logits is not None:
            draft_lse = _logsumexp(*draft_blocks)
        return cls(target_logits, target_lse, draft_logits, draft_lse)

    def normalizers(self, row: int | None) -> tuple[float, float]:
        """Return the logsumexp of the target and of the drafter in a logits row, 0 for no row."""
        if row is None:
            return 0.0, 0.0
        return float(self.target_lse[row]), float(self.draft_lse[row])

    def of_drafts(
        self, start: int, slot: int, temperature: float, drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's and the drafter's log-probabilities of one request's drafts, [n]."""
        steps, tokens = np.arange(len(drafts)), np.maximum(drafts, 0)
        rows = start + steps
        target = self.target_logits[rows, tokens].float().numpy() - self.target_lse[rows]
        if self.draft_logits is None:
            return target, np.zeros_like(target)
        draft = self.draft_logits[slot, steps, tokens].float().numpy() / np.float32(temperature)
        return target, draft - self.draft_lse[rows]


def _compute_local_logits_stats_kernel(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Reduce the logits of every draft: argmax and max where greedy, else max and sumexp.

    Rows of bonus tokens, and what a row does not need, stay unwritten.
    """
    slots, steps = expanded_idx_mapping_ptr.numpy(), expanded_local_pos_ptr.numpy()
    temperatures = temp_ptr.float().numpy()[slots]
    verifies = steps < num_speculative_steps

    def target_logits(rows: np.ndarray) -> np.ndarray:
        logits: np.ndarray = target_logits_ptr[torch.from_numpy(rows), :vocab_size].float().numpy()
        return logits

    rows = np.flatnonzero(verifies & (temperatures == 0))
    if len(rows):
        tokens, values = best_per_block(target_logits(rows), None, BLOCK_SIZE)
        target_local_argmax_ptr.numpy()[rows] = tokens
        target_local_max_ptr.numpy()[rows] = values
    rows = np.flatnonzero(verifies & (temperatures != 0))
    if not len(rows):
        return
    maxima, sums = _max_and_sumexp(target_logits(rows), BLOCK_SIZE)
    target_local_max_ptr.numpy()[rows], target_local_sumexp_ptr.numpy()[rows] = maxima, sums
    if draft_logits_ptr is not None:
        drafts = draft_logits_ptr[
            torch.from_numpy(slots[rows]).long(), torch.from_numpy(steps[rows]).long(), :vocab_size
        ]
        logits = drafts.float().numpy() / temperatures[rows, None]
        maxima, sums = _max_and_sumexp(logits, BLOCK_SIZE)
        draft_local_max_ptr.numpy()[rows], draft_local_sumexp_ptr.numpy()[rows] = maxima, sums


# --------------------------------------------------------------------------- block verification


def _compute_cumulative_log_p_kernel(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
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
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    num_warps: int = 1,
) -> None:
    """Write log p_{i+1} = min(log p_i + log target - log draft, 0) for every draft i, p_0 = 1.

    Greedy rows stay unwritten; drafts that are not there carry the value before them.
    """
    distributions = Distributions.of(
        target_logits_ptr,
        (target_local_max_ptr, target_local_sumexp_ptr),
        draft_logits_ptr,
        (draft_local_max_ptr, draft_local_sumexp_ptr),
    )
    cumulative, starts = cumulative_log_p_ptr.numpy(), cu_num_logits_ptr.tolist()
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        temperature = temp_ptr[slot].item()
        if temperature == 0:
            continue
        start, end = starts[row], starts[row + 1]
        drafts = draft_sampled_ptr.numpy()[start + 1 : end]
        target, draft = distributions.of_drafts(start, slot, temperature, drafts)
        log_p = np.float32(0)
        for step, log_ratio in enumerate(np.where(drafts >= 0, target - draft, np.float32(0))):
            log_p = np.fmin(log_p + log_ratio, np.float32(0))
            cumulative[start + step] = log_p


def _compute_local_residual_mass_kernel(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:
    """Sum max(p_i * target - draft, 0) over each vocabulary block, for every draft i > 0.

    Rows of a first draft, of a bonus token, of a missing draft and of greedy requests stay
    unwritten.
    """
    slots, steps = expanded_idx_mapping_ptr.tolist(), expanded_local_pos_ptr.numpy()
    drafts, temperatures = draft_sampled_ptr.numpy(), temp_ptr.float().numpy()[slots]
    has_draft = np.append(drafts[1:] >= 0, False)
    is_needed = (steps > 0) & (steps < num_speculative_steps) & has_draft & (temperatures != 0)
    target_lse = _logsumexp(target_local_max_ptr, target_local_sumexp_ptr)
    draft_lse = _logsumexp(draft_local_max_ptr, draft_local_sumexp_ptr)
    for row in np.flatnonzero(is_needed):
        p = np.exp(cumulative_log_p_ptr.numpy()[row - 1])
        target = target_logits_ptr[row, :vocab_size].float().numpy() - target_lse[row]
        draft = draft_logits_ptr[slots[row], steps[row], :vocab_size].float().numpy()
        draft = draft / temperatures[row] - draft_lse[row]
        mass = vocab_blocks(p * np.exp(target) - np.exp(draft), BLOCK_SIZE)
        local_residual_mass_ptr.numpy()[row] = np.maximum(mass, np.float32(0)).sum(1)


STATISTICS_KERNELS: dict[str, Callable[..., None]] = {
    _UTILS + "_compute_local_logits_stats_kernel": _compute_local_logits_stats_kernel,
    _UTILS + "_compute_cumulative_log_p_kernel": _compute_cumulative_log_p_kernel,
    _UTILS + "_compute_local_residual_mass_kernel": _compute_local_residual_mass_kernel,
}
