"""The Triton kernels that accept, reject and replace draft tokens, in numpy.

Rows, drafts and `local_` buffers are laid out as draft_statistics.py says. Verification keeps a
request's drafts up to the first that it rejects, and the token after those is drawn anew: from the
target where all were accepted (the bonus token), else from what the target has more of than the
drafter. Sources: Leviathan et al. 2023 (arXiv 2211.17192), Sun et al. 2024 (arXiv 2403.10444).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class _Row(NamedTuple):
    """One row: n drafts, a uniform number for each, logits rows `start` to `end` (the bonus's)."""

    slot: int
    temperature: float
    start: int
    end: int
    drafts: np.ndarray
    uniform: np.ndarray

    @property
    def logits(self) -> slice:
        """The logits rows that verify the drafts."""
        return slice(self.start, self.start + len(self.drafts))


def _rows_of(
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draws: bool,
) -> Iterator[_Row]:
    """Cut a batch's drafts into rows; a draft that is not there (-1) ends those of a random row.

    draws: False where nobody looks at the uniform numbers, which are zeros then.
    """
    starts = cu_num_logits.tolist()
    uniform = np.zeros(starts[-1], dtype=np.float32)
    if draws:
        row_seeds = np.repeat(seeds.numpy()[idx_mapping.numpy()], np.diff(starts))
        uniform = philox_uniform(row_seeds, positions.numpy()[: starts[-1]])
    for row, slot in enumerate(idx_mapping.tolist()):
        start, end, temperature = starts[row], starts[row + 1] - 1, temperatures[slot].item()
        drafts = draft_sampled.numpy()[start + 1 : end + 1]
        if temperature != 0:
            drafts = drafts[: _num_leading(drafts >= 0)]
        yield _Row(slot, temperature, start, end, drafts, uniform[start : start + len(drafts)])


class _Verdict(NamedTuple):
    """Drafts that a row keeps, the tokens looked at, and the logits row to normalize, if any."""

    num_kept: int
    tokens: np.ndarray
    normalized_row: int | None


@dataclass(frozen=True)
class _Verifier:
    """Decides how many drafts of a row are kept.

    Attributes:
        distributions: of target and drafter.
        target_best: (largest logit, its token) of each logits row and vocabulary block.
        rates: how often a draft is kept whatever it is; None to verify.
        block_masses: (joint ratio, residual mass) of each draft for block verification, or None.
    """

    distributions: Distributions
    target_best: tuple[torch.Tensor, torch.Tensor]
    rates: torch.Tensor | None
    block_masses: tuple[torch.Tensor, torch.Tensor | None] | None

    def verdict(self, row: _Row) -> _Verdict:
        """Verify one row."""
        is_kept = None
        if self.rates is not None:
            is_kept = row.uniform < self.rates.numpy()[: len(row.drafts)]
        if row.temperature == 0:
            return self._greedy(row, is_kept)
        if self.block_masses is not None:
            return self._by_block(row, *self.block_masses)
        return self._by_ratio(row, is_kept)

    def _greedy(self, row: _Row, is_kept: np.ndarray | None) -> _Verdict:
        """Keep drafts while they are the target's argmax, and end with that argmax."""
        best = _best_tokens(*self.target_best, row.logits)
        is_kept = (best == row.drafts if is_kept is None else is_kept) & (row.drafts >= 0)
        num_kept = _num_leading(is_kept)
        return _Verdict(num_kept, np.where(is_kept, row.drafts, best)[: num_kept + 1], None)

    def _by_block(self, row: _Row, log_p: torch.Tensor, masses: torch.Tensor | None) -> _Verdict:
        """Keep drafts by the joint ratios of their prefixes."""
        target, _ = self.distributions.of_drafts(row.start, row.slot, row.temperature, row.drafts)
        ratios = log_p.numpy()[row.logits]
        residual = None if masses is None else masses.numpy()[row.logits]
        num_kept = _num_kept_by_block(ratios, _next_masses(ratios, target, residual), row.uniform)
        rejected = row.start + num_kept
        return _Verdict(num_kept, row.drafts, rejected if rejected < row.end else None)

    def _by_ratio(self, row: _Row, is_kept: np.ndarray | None) -> _Verdict:
        """Keep drafts while target > u * draft."""
        target, draft = self.distributions.of_drafts(
            row.start, row.slot, row.temperature, row.drafts
        )
        num_kept = _num_leading(
            target > np.log(row.uniform) + draft if is_kept is None else is_kept
        )
        tokens = row.drafts[: num_kept + 1]
        return _Verdict(num_kept, tokens, row.start + len(tokens) - 1 if len(tokens) else None)


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
    best = (target_local_max_ptr, target_local_argmax_ptr)
    log_p, residual = cumulative_log_p_ptr, local_residual_mass_ptr
    masses = None if log_p is None else (log_p, residual)
    verifier = _Verifier(distributions, best, synthetic_conditional_rates_ptr, masses)
    batch = cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr, temp_ptr, seed_ptr, pos_ptr
    draws = SYNTHETIC_MODE or bool((temp_ptr[idx_mapping_ptr] != 0).any())
    for index, row in enumerate(_rows_of(*batch, draws)):
        verdict = verifier.verdict(row)
        sampled_ptr.numpy()[index, : len(verdict.tokens)] = verdict.tokens
        rejected_steps_ptr[index] = verdict.num_kept
        normalizers = distributions.normalizers(verdict.normalized_row)
        target_rejected_logsumexp_ptr[index], draft_rejected_logsumexp_ptr[index] = normalizers


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
    for row in np.flatnonzero(is_bonus | (temperatures != 0)):
        index, slot, temperature = indices[row], slots[row], temperatures[row]
        logits = target_logits_ptr[index, :vocab_size].float().numpy()
        rejected = -1 if is_bonus[row] else int(draft_sampled_ptr[index + 1])
        if rejected >= 0 and draft_logits_ptr is None:
            logits = np.where(np.arange(vocab_size) == rejected, np.float32(-np.inf), logits)
        elif rejected >= 0 and draft_logits_ptr is not None:
            log_target = logits - target_rejected_logsumexp_ptr.numpy()[row]
            if cumulative_log_p_ptr is not None and num_kept[row]:
                log_target = log_target + cumulative_log_p_ptr.numpy()[index - 1]
            draft = draft_logits_ptr[slot, num_kept[row], :vocab_size].float().numpy() / temperature
            logits = _residual(log_target, draft - draft_rejected_logsumexp_ptr.numpy()[row])
        seed, position = int(seed_ptr[slot]), int(pos_ptr[index])
        noise = gumbel_noise(seed, position, vocab_size, USE_FP64) if temperature else None
        best = map(torch.from_numpy, best_per_block(logits, noise, BLOCK_SIZE))
        resampled_local_argmax_ptr[row], resampled_local_max_ptr[row] = best


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
