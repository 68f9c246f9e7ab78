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

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dllm.cpu.gumbel import best_per_block, vocab_blocks
from dllm.cpu.ragged import spread

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
class Drafts:
    """Drafts of any requests, [n] each.

    Attributes:
        logits_rows: where the target's logits are that verify each.
        slots, steps: whose it is, and its place among the drafts of that request.
        temperatures: of the request, fp32.
        tokens: the draft; -1 where there is none.
    """

    logits_rows: np.ndarray
    slots: np.ndarray
    steps: np.ndarray
    temperatures: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(
        cls,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draft_sampled: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> "Drafts":
        """One for each logits row of a batch; there is none (-1) at the row of a bonus token."""
        starts = cu_num_logits.numpy()
        rows, steps = spread(starts)
        slots = idx_mapping.numpy()[rows]
        tokens = np.append(draft_sampled.numpy()[1 : starts[-1]], -1)
        tokens[starts[1:] - 1] = -1
        return cls(np.arange(len(rows)), slots, steps, temperatures.float().numpy()[slots], tokens)

    def some(self, chosen: np.ndarray | slice) -> "Drafts":
        """Those."""
        return Drafts(*(field[chosen] for field in vars(self).values()))


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

    def of_drafts(self, drafts: Drafts) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's and the drafter's log-probabilities of drafts, [n] each."""
        logits_rows, tokens = drafts.logits_rows, np.maximum(drafts.tokens, 0)
        target = self.target_logits[logits_rows, tokens].float().numpy()
        target -= self.target_lse[logits_rows]
        if self.draft_logits is None:
            return target, np.zeros_like(target)
        draft = self.draft_logits[drafts.slots, drafts.steps, tokens].float().numpy()
        return target, draft / drafts.temperatures - self.draft_lse[logits_rows]


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
        tokens, values = best_per_block(target_logits(rows), BLOCK_SIZE)
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
    every = Drafts.of(cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr, temp_ptr)
    cumulative, starts = cumulative_log_p_ptr.numpy(), cu_num_logits_ptr.tolist()
    for start, end in itertools.pairwise(starts):
        drafts = every.some(slice(start, end - 1))
        if every.temperatures[start] == 0:
            continue
        target, draft = distributions.of_drafts(drafts)
        log_p = np.float32(0)
        ratios = np.where(drafts.tokens >= 0, target - draft, np.float32(0))
        for step, log_ratio in enumerate(ratios):
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
