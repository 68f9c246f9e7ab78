"""The Triton kernels that reduce logits for the verification of draft tokens, in numpy.

`batch` explains how these functions are written. The target is the model that is served; the
drafter proposes tokens, the drafts, and the target verifies them. A request with n drafts has n + 1
logits rows, from `start` on (an entry of `cu_num_logits`):

    draft i (from 0)     draft_sampled[start + i + 1]; -1 where a draft is missing
    its target logits    target_logits[start + i]      [num_logits, V], divided by the temperature
    its draft logits     draft_logits[slot, i]         [max_num_reqs, steps, V], not divided; None
                         if the drafter gave its draft probability 1
    the bonus token      target_logits[start + n]      is drawn when all drafts are accepted

Buffers named `local_` pass statistics from one kernel to the next. They have a column for each
vocabulary block: its max, its argmax, or its sum of exp(logit - max) ("sumexp").
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from dllm.cpu.gumbel import best_per_block, vocab_blocks
from dllm.cpu.ragged import Kernel, spread

_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."


def _max_and_sumexp(logits: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return max and sum of exp(logit - max) of each block, both [rows, blocks].

    logits: [rows, V]. A block in which all logits are -inf has sum 0.
    """
    blocks = vocab_blocks(logits, block_size)
    maxima = blocks.max(-1)
    finite = np.where(maxima > -np.inf, maxima, np.float32(0))
    return maxima, np.exp(blocks - finite[..., None]).sum(-1)


def _logsumexp(local_max: torch.Tensor, local_sumexp: torch.Tensor) -> np.ndarray:
    """Return logsumexp of every logits row, [num_logits], from the statistics of its blocks.

    Rows that no kernel has written give some value, which nobody reads.
    """
    maxima, sumexps = local_max.numpy(), local_sumexp.numpy()
    total = maxima.max(1)
    with np.errstate(all="ignore"):
        return total + np.log((sumexps * np.exp(maxima - total[:, None])).sum(1))


@dataclass(frozen=True)
class Drafts:
    """Some drafts, of one or several requests. All attributes are arrays, [n].

    Attributes:
        logits_rows: the row of target_logits that verifies each draft.
        slots, steps: the slot of its request, and its place (from 0) among that request's drafts.
        temperatures: of its request, fp32; 0 is greedy.
        tokens: the draft's token; -1 where there is none.
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
        """An entry for each logits row of a batch; the row of a bonus token has token -1."""
        starts = cu_num_logits.numpy()
        rows, steps = spread(starts)
        slots = idx_mapping.numpy()[rows]
        tokens = np.append(draft_sampled.numpy()[1 : starts[-1]], -1)
        tokens[starts[1:] - 1] = -1
        return cls(np.arange(len(rows)), slots, steps, temperatures.float().numpy()[slots], tokens)

    def select(self, chosen: np.ndarray | slice) -> "Drafts":
        """The drafts at these indices."""
        return Drafts(*(field[chosen] for field in vars(self).values()))


@dataclass(frozen=True)
class Distributions:
    """The distributions of the target and the drafter, as logits and the logsumexp of each row.

    Attributes:
        target_logits, draft_logits: as at the top of this file.
        target_lse, draft_lse: [num_logits], logsumexp of the logits divided by the temperature.
    """

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
        """Compute both logsumexps from (max, sumexp) of the vocabulary blocks."""
        target_lse = _logsumexp(*target_blocks)
        draft_lse = np.zeros_like(target_lse)
        if draft_logits is not None:
            draft_lse = _logsumexp(*draft_blocks)
        return cls(target_logits, target_lse, draft_logits, draft_lse)

    def of_drafts(self, drafts: Drafts) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's and the drafter's log-probabilities of drafts, [n] each.

        A missing draft (-1) gets those of token 0. A drafter without logits gives 0.
        """
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
    """Reduce the logits that verify each draft to statistics of vocabulary blocks.

    For greedy requests: argmax and max of the target. For the others: max and sumexp, of target and
    drafter. Rows of bonus tokens stay unwritten.
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
# Sun et al. 2024 (arXiv 2403.10444). p_i, as there, is the product of target / draft probabilities
# of the first i drafts, cut to 1 after each factor.


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

    target and draft are the probabilities of draft i. Greedy requests stay unwritten; a missing
    draft repeats the value before it.
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
        drafts = every.select(slice(start, end - 1))
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
    """Sum max(p_i * target - draft, 0) over the tokens of each vocabulary block, for drafts i > 0.

    target and draft are the probabilities of each token at the place of draft i. The rows of first
    drafts, bonus tokens, missing drafts and greedy requests stay unwritten.
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


STATISTICS_KERNELS: dict[str, Kernel] = {
    _UTILS + "_compute_local_logits_stats_kernel": _compute_local_logits_stats_kernel,
    _UTILS + "_compute_cumulative_log_p_kernel": _compute_cumulative_log_p_kernel,
    _UTILS + "_compute_local_residual_mass_kernel": _compute_local_residual_mass_kernel,
}
