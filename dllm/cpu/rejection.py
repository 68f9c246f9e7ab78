"""The Triton kernels that accept, reject and replace draft tokens, in numpy.

Rows, drafts and `local_` buffers are laid out as draft_statistics.py says. Verification keeps a
request's drafts up to the first that it rejects, and the token after those is drawn anew: from the
target where all were accepted (the bonus token), else from what the target has more of than the
drafter. Sources: Leviathan et al. 2023 (arXiv 2211.17192), Sun et al. 2024 (arXiv 2403.10444).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dllm.cpu.draft_statistics import STATISTICS_KERNELS, Distributions, Drafts
from dllm.cpu.gumbel import best_per_block, drawn_at_once, gumbel_noise, philox_uniform
from dllm.cpu.ragged import spread

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


@dataclass(frozen=True)
class _Verdict:
    """What becomes of each row's drafts, [rows] each.

    Attributes:
        num_kept: drafts that are kept.
        last: the last one that is looked at; -1 where there is none.
        normalized: the step whose logits are normalized; none where it is not one of a draft.
    """

    num_kept: np.ndarray
    last: np.ndarray
    normalized: np.ndarray


@dataclass(frozen=True)
class _Verifier:
    """Decides how many drafts of every row are kept.

    Attributes:
        starts: [rows + 1], of each row's logits.
        drafts: one for each logits row; of a random row, what follows one that is not there counts
            for nothing.
        uniform: [num_logits], a number in (0, 1) for each draft.
        distributions: of target and drafter.
    """

    starts: np.ndarray
    drafts: Drafts
    uniform: np.ndarray
    distributions: Distributions

    @property
    def is_random(self) -> np.ndarray:
        """Whether each row's temperature is not 0."""
        return self.drafts.temperatures[self.starts[:-1]] != 0

    def by_rate(self, rates: torch.Tensor) -> np.ndarray:
        """Keep drafts, [num_logits], as often as the rates of their steps say."""
        chances = np.append(rates.numpy(), np.float32(0))[self.drafts.steps]
        return (self.uniform < chances) & (self.drafts.tokens >= 0)

    def by_target(self, best: np.ndarray) -> np.ndarray:
        """Keep drafts, [num_logits], while target > u * draft; of greedy rows, the best tokens."""
        is_kept: np.ndarray = (self.drafts.tokens == best) & (self.drafts.tokens >= 0)
        random = np.flatnonzero((self.drafts.temperatures != 0) & (self.drafts.tokens >= 0))
        if len(random):
            target, draft = self.distributions.of_drafts(self.drafts.some(random))
            is_kept[random] = target > np.log(self.uniform[random]) + draft
        return is_kept

    def one_by_one(self, is_kept: np.ndarray) -> _Verdict:
        """Keep each row's drafts up to the first that is not to be kept."""
        num_kept = self._num_before(~is_kept)
        looked_at = np.minimum(num_kept, self._num_before(self.drafts.tokens < 0) - 1)
        last = np.where(self.is_random, looked_at, num_kept)
        return _Verdict(num_kept, last, np.where(self.is_random, last, -1))

    def by_block(
        self, is_kept: np.ndarray, log_p: torch.Tensor, masses: torch.Tensor | None
    ) -> _Verdict:
        """Keep drafts of random rows by the joint ratios of their prefixes."""
        verdict = self.one_by_one(is_kept)
        num_there = self._num_before(self.drafts.tokens < 0)
        for row in np.flatnonzero(self.is_random):
            span = slice(self.starts[row], self.starts[row] + num_there[row])
            target, _ = self.distributions.of_drafts(self.drafts.some(span))
            ratios = log_p.numpy()[span]
            residual = None if masses is None else masses.numpy()[span]
            next_masses = _next_masses(ratios, target, residual)
            kept = _num_kept_by_block(ratios, next_masses, self.uniform[span])
            verdict.num_kept[row] = verdict.normalized[row] = kept
            verdict.last[row] = num_there[row] - 1
        return verdict

    def _num_before(self, is_end: np.ndarray) -> np.ndarray:
        """Count each row's drafts before the first of them (or the bonus token) that is the end."""
        steps = np.where(is_end, self.drafts.steps, len(is_end))
        counts: np.ndarray = np.minimum.reduceat(steps, self.starts[:-1])
        return counts


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

    sampled: [rows, steps + 1]; what no draft reaches stays unwritten.
    """
    distributions = Distributions.of(
        target_logits_ptr,
        (target_local_max_ptr, target_local_sumexp_ptr),
        draft_logits_ptr,
        (draft_local_max_ptr, draft_local_sumexp_ptr),
    )
    starts, rates = cu_num_logits_ptr.numpy(), synthetic_conditional_rates_ptr
    drafts = Drafts.of(cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr, temp_ptr)
    uniform = np.zeros(len(drafts.steps), dtype=np.float32)  # nobody looks at those of greedy rows
    if SYNTHETIC_MODE or (drafts.temperatures != 0).any():
        uniform = philox_uniform(seed_ptr.numpy()[drafts.slots], pos_ptr.numpy()[: len(uniform)])
    verifier = _Verifier(starts, drafts, uniform, distributions)
    best = _best_tokens(target_local_max_ptr, target_local_argmax_ptr, slice(starts[-1]))
    is_kept = verifier.by_target(best) if rates is None else verifier.by_rate(rates)
    if cumulative_log_p_ptr is None:
        verdict = verifier.one_by_one(is_kept)
    else:
        verdict = verifier.by_block(is_kept, cumulative_log_p_ptr, local_residual_mass_ptr)

    num_drafts = np.diff(starts) - 1
    rows, steps = spread(starts)
    at = np.flatnonzero((steps <= verdict.last[rows]) & (steps < num_drafts[rows]))
    tokens = np.where(is_kept | (drafts.temperatures != 0), drafts.tokens, best)
    sampled_ptr.numpy()[rows[at], steps[at]] = tokens[at]
    rejected_steps_ptr.numpy()[: len(num_drafts)] = verdict.num_kept
    is_one = (verdict.normalized >= 0) & (verdict.normalized < num_drafts)
    logits_rows = np.where(is_one, starts[:-1] + verdict.normalized, 0)
    for found, lse in (
        (target_rejected_logsumexp_ptr, distributions.target_lse),
        (draft_rejected_logsumexp_ptr, distributions.draft_lse),
    ):
        found.numpy()[: len(num_drafts)] = np.where(is_one, lse[logits_rows], 0)


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

    Greedy rows that rejected a draft already have their token and stay unwritten.
    """
    assert not WATERMARK, "watermarked verification has no CPU kernel"
    starts, num_kept = cu_num_logits_ptr.numpy(), rejected_step_ptr.numpy()
    indices = starts[:-1] + num_kept
    slots, is_bonus = expanded_idx_mapping_ptr.numpy()[indices], indices == starts[1:] - 1
    temperatures = temp_ptr.float().numpy()[slots]
    drafts = np.append(draft_sampled_ptr.numpy()[: starts[-1]], -1)[indices + 1]
    rejected = np.where(is_bonus, -1, drafts)
    chosen = np.flatnonzero(is_bonus | (temperatures != 0))
    for rows in drawn_at_once(chosen, vocab_size):
        logits = target_logits_ptr[indices[rows], :vocab_size].float().numpy()
        places = np.flatnonzero(rejected[rows] >= 0)
        those = rows[places]
        if draft_logits_ptr is None:
            logits[places, rejected[those]] = -np.inf
        elif len(those):
            log_target = logits[places] - target_rejected_logsumexp_ptr.numpy()[those, None]
            if cumulative_log_p_ptr is not None:
                log_p = cumulative_log_p_ptr.numpy()[indices[those] - 1]
                log_target += np.where(num_kept[those] > 0, log_p, np.float32(0))[:, None]
            draft = draft_logits_ptr[slots[those], num_kept[those], :vocab_size].float().numpy()
            draft = draft / temperatures[those, None]
            draft -= draft_rejected_logsumexp_ptr.numpy()[those, None]
            logits[places] = _residual(log_target, draft)
        values: np.ndarray = logits.astype(np.float64 if USE_FP64 else np.float32)
        places = np.flatnonzero(temperatures[rows])
        if len(places):
            those = rows[places]
            where = seed_ptr.numpy()[slots[those]], pos_ptr.numpy()[indices[those]]
            values[places] += gumbel_noise(*where, vocab_size, USE_FP64)
        tokens, best = best_per_block(values, BLOCK_SIZE)
        resampled_local_argmax_ptr.numpy()[rows] = tokens
        resampled_local_max_ptr.numpy()[rows] = best


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
