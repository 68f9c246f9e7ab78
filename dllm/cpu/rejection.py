"""The Triton kernels that accept, reject and replace draft tokens, in numpy.

`draft_statistics` says what target, drafts, logits rows and `local_` buffers are. Verification
keeps a request's drafts up to the first that it rejects. One more token is drawn after the kept
ones. If all drafts were accepted it is drawn from the target's distribution (the bonus token).
Otherwise it replaces the rejected draft, and is drawn from the residual: max(target - draft, 0) of
the two distributions, normalized. So the output is distributed as the target's own.

Two rules decide which drafts are kept: one draft at a time (Leviathan et al. 2023, arXiv
2211.17192), or the drafts of a request together, "block verification" (Sun et al. 2024, arXiv
2403.10444), which keeps more.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dllm.cpu.draft_statistics import STATISTICS_KERNELS, Distributions, Drafts
from dllm.cpu.gumbel import best_per_block, drawn_at_once, gumbel_noise, philox_uniform
from dllm.cpu.ragged import Kernel, spread

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
    """Copy sampled tokens [rows, width] to a flat array that is indexed by logits row.

    The first num_sampled tokens of a row go to the first of its logits rows.
    """
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
    """Copy the input token and the position of every logits row.

    Real drafts follow a sampled token, which is behind the prompt. What looks like drafts of a row
    that is still within its prompt are placeholders; they become -1.
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
    """Return the token with the largest value over all vocabulary blocks, for each of `rows`.

    local_max, local_argmax: [rows, blocks]. NaN counts as -inf.
    """
    values, tokens = local_max.numpy()[rows], local_argmax.numpy()[rows]
    blocks = np.where(np.isnan(values), -np.inf, values).argmax(1)
    return tokens[np.arange(len(tokens)), blocks]


def _residual_masses(
    log_p: np.ndarray, target: np.ndarray, local_residual_mass: np.ndarray | None
) -> np.ndarray:
    """Return the sum of max(p_i * target - draft, 0) over the vocabulary for drafts 1 .. n - 1.

    log_p: [n], the logarithm of p_1 .. p_n. target: [n], the target's log-probabilities of the
    drafts. local_residual_mass: [n, blocks], the sums over vocabulary blocks. It is None if the
    drafter gave its drafts probability 1; the result is then p_i * (1 - target probability).
    """
    if local_residual_mass is not None:
        return local_residual_mass[1:].sum(1)
    return np.exp(log_p[:-1]) * (np.float32(1) - np.exp(target[1:]))


def _num_kept_by_block(log_p: np.ndarray, masses: np.ndarray, uniform: np.ndarray) -> int:
    """Return how many drafts block verification keeps: all up to the last i with u_i <= h_i.

    log_p: [n], the logarithm of p_1 .. p_n. masses: [n - 1], from `_residual_masses`. uniform: [n].
    h_i = mass_i / (mass_i + 1 - p_i); at the last draft it is p_n.
    """
    h = np.exp(log_p)
    denominators = masses + np.float32(1) - h[:-1]
    with np.errstate(all="ignore"):
        h[:-1] = np.where(denominators > 0, masses / denominators, np.float32(1))
    kept = np.flatnonzero(uniform <= h)
    return int(kept[-1]) + 1 if len(kept) else 0


@dataclass(frozen=True)
class _Verdict:
    """What was decided about each row's drafts. All attributes are [rows].

    Attributes:
        num_kept: how many drafts are kept.
        last: the last draft that verification looked at; its token is written to the output too.
            -1 where there is none.
        normalized: the draft whose logsumexps resampling needs (the rejected one). -1, or the
            number of drafts, where resampling needs none.
    """

    num_kept: np.ndarray
    last: np.ndarray
    normalized: np.ndarray


@dataclass(frozen=True)
class _Verifier:
    """Decides how many drafts of every row are kept.

    A row is greedy (temperature 0) or random. Drafts of a random row that follow a missing draft
    are ignored.

    Attributes:
        starts: [rows + 1], where each row's logits rows start.
        drafts: one for each logits row.
        uniform: [num_logits], a random number in (0, 1) for each draft.
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

    def accepted_at_rates(self, rates: torch.Tensor) -> np.ndarray:
        """Whether each draft is accepted, [num_logits], if acceptance is only simulated.

        rates: [steps], the probability for draft 0, 1, ... of a request (vLLM's synthetic mode).
        """
        chances = np.append(rates.numpy(), np.float32(0))[self.drafts.steps]
        return (self.uniform < chances) & (self.drafts.tokens >= 0)

    def accepted_by_target(self, best: np.ndarray) -> np.ndarray:
        """Whether the target accepts each draft taken by itself, [num_logits].

        On greedy rows it accepts its own best token, best: [num_logits]. On random rows it accepts
        a draft if its target probability > u * its draft probability, with a uniform number u.
        """
        is_accepted: np.ndarray = (self.drafts.tokens == best) & (self.drafts.tokens >= 0)
        random = np.flatnonzero((self.drafts.temperatures != 0) & (self.drafts.tokens >= 0))
        if len(random):
            target, draft = self.distributions.of_drafts(self.drafts.select(random))
            is_accepted[random] = target > np.log(self.uniform[random]) + draft
        return is_accepted

    def verify_one_by_one(self, is_accepted: np.ndarray) -> _Verdict:
        """Keep each row's drafts before the first that is not accepted ([num_logits])."""
        num_kept = self._num_before(~is_accepted)
        looked_at = np.minimum(num_kept, self._num_before(self.drafts.tokens < 0) - 1)
        last = np.where(self.is_random, looked_at, num_kept)
        return _Verdict(num_kept, last, np.where(self.is_random, last, -1))

    def verify_by_block(
        self, is_accepted: np.ndarray, log_p: torch.Tensor, masses: torch.Tensor | None
    ) -> _Verdict:
        """Keep drafts of random rows by block verification, of greedy rows one by one.

        log_p: [num_logits]. masses: [num_logits, blocks]. Both as in `_residual_masses`.
        """
        verdict = self.verify_one_by_one(is_accepted)
        num_there = self._num_before(self.drafts.tokens < 0)
        for row in np.flatnonzero(self.is_random):
            span = slice(self.starts[row], self.starts[row] + num_there[row])
            target, _ = self.distributions.of_drafts(self.drafts.select(span))
            ratios = log_p.numpy()[span]
            residual = None if masses is None else masses.numpy()[span]
            sums = _residual_masses(ratios, target, residual)
            kept = _num_kept_by_block(ratios, sums, self.uniform[span])
            verdict.num_kept[row] = verdict.normalized[row] = kept
            verdict.last[row] = num_there[row] - 1
        return verdict

    def _num_before(self, is_end: np.ndarray) -> np.ndarray:
        """Count each row's drafts before the first with is_end, [num_logits].

        is_end has to be True at bonus tokens, so that every row has an end.
        """
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
    """Decide which drafts each row keeps.

    Writes three things: the number of kept drafts (rejected_steps); the tokens of the drafts that
    were looked at (sampled, [rows, steps + 1]; on greedy rows a rejected draft is already replaced
    by the target's token); and the logsumexps of target and drafter at the rejected draft, which
    resampling needs.
    """
    distributions = Distributions.of(
        target_logits_ptr,
        (target_local_max_ptr, target_local_sumexp_ptr),
        draft_logits_ptr,
        (draft_local_max_ptr, draft_local_sumexp_ptr),
    )
    starts, rates = cu_num_logits_ptr.numpy(), synthetic_conditional_rates_ptr
    drafts = Drafts.of(cu_num_logits_ptr, idx_mapping_ptr, draft_sampled_ptr, temp_ptr)
    uniform = np.zeros(len(drafts.steps), dtype=np.float32)  # greedy rows do not need any
    if SYNTHETIC_MODE or (drafts.temperatures != 0).any():
        uniform = philox_uniform(seed_ptr.numpy()[drafts.slots], pos_ptr.numpy()[: len(uniform)])
    verifier = _Verifier(starts, drafts, uniform, distributions)
    best = _best_tokens(target_local_max_ptr, target_local_argmax_ptr, slice(starts[-1]))
    if rates is None:
        is_accepted = verifier.accepted_by_target(best)
    else:
        is_accepted = verifier.accepted_at_rates(rates)
    if cumulative_log_p_ptr is None:
        verdict = verifier.verify_one_by_one(is_accepted)
    else:
        verdict = verifier.verify_by_block(
            is_accepted, cumulative_log_p_ptr, local_residual_mass_ptr
        )

    num_drafts = np.diff(starts) - 1
    rows, steps = spread(starts)
    at = np.flatnonzero((steps <= verdict.last[rows]) & (steps < num_drafts[rows]))
    tokens = np.where(is_accepted | (drafts.temperatures != 0), drafts.tokens, best)
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
    """Return log max(exp(log_target) - exp(log_draft), 0), accurate where the two are close."""
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
    """Draw the token after each row's kept drafts: the best one of each vocabulary block.

    Greedy rows that rejected a draft already have the target's token and stay unwritten.
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
        # `places` are those of `rows` that rejected a draft: their logits become the residual's.
        if draft_logits_ptr is None:  # the drafter gave its draft probability 1
            logits[places, rejected[those]] = -np.inf
        elif len(those):
            log_target = logits[places] - target_rejected_logsumexp_ptr.numpy()[those, None]
            if cumulative_log_p_ptr is not None:  # block verification: max(p_i * target - draft, 0)
                log_p = cumulative_log_p_ptr.numpy()[indices[those] - 1]
                log_target += np.where(num_kept[those] > 0, log_p, np.float32(0))[:, None]
            draft = draft_logits_ptr[slots[those], num_kept[those], :vocab_size].float().numpy()
            draft = draft / temperatures[those, None]
            draft -= draft_rejected_logsumexp_ptr.numpy()[those, None]
            logits[places] = _residual(log_target, draft)
        # A sample is the argmax of logits + Gumbel noise; greedy rows have no noise.
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
    """Write the token that was drawn after each row's kept drafts, and add 1 to num_sampled.

    sampled: [rows, steps + 1]. num_sampled comes with the number of kept drafts. Greedy rows that
    rejected a draft have their token already, and are only counted.
    """
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


REJECTION_KERNELS: dict[str, Kernel] = {
    _SAMPLER + "_flatten_sampled_kernel": _flatten_sampled_kernel,
    _SAMPLER + "_gather_draft_sampled_kernel": _gather_draft_sampled_kernel,
    _UTILS + "_rejection_kernel": _rejection_kernel,
    _UTILS + "_resample_kernel": _resample_kernel,
    _UTILS + "_insert_resampled_kernel": _insert_resampled_kernel,
    **STATISTICS_KERNELS,
}
