"""Which drafts are kept: those that are the target's own tokens, or by rejection sampling.

At every verified position the target draws its own token, with the random numbers that plain
decoding uses there. They are a function of the request's seed and the position alone. Drafts are
kept as long as they equal these tokens, and the first token that differs takes the place of its
draft. So the text is the one of plain decoding, whatever was drafted and however many drafts were
verified: the drafter changes the speed and nothing else.

A draft that is the drafter's most likely token x is kept with the target's probability p(x), as in
rejection sampling (Leviathan et al. 2023, arXiv 2211.17192). A sampled draft is drawn with the
random numbers of the target at its position (Gumbel coupling), so that two similar distributions
mostly give the same token. Source: Daliri, Musco and Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding" (arXiv 2408.07978): a sampled draft is kept with probability
(1 - d) / (1 + d) or more, d being the total variation between the two distributions.

Rejection sampling keeps it with probability 1 - d: x, drawn from q, is kept with probability min(1,
p(x) / q(x)), and a rejected draft is replaced by a token drawn from max(p - q, 0), normalized.
Every token has the target's distribution p, too, but a seed gives another text with another
drafter, policy or width.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dllm.cpu.gumbel import murmur3


class OwnRule(RejectionSampler):
    """vLLM's sampler of steps with drafts, for our rule."""

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each request has a row behind its last token and one behind each draft.

        Args:
            logits: ``[num_logits, vocab]``.
            draft_logits: ``[slots, N, vocab]``, the drafter's, not divided by the temperature;
                None if each draft is the only token that could have been drafted.
            draft_sampled: ``[num_logits]``, the input token of each row; behind the first: drafts.
            pos: ``[num_logits]``, position of that input token.
            cu_num_logits: ``[requests + 1]``, first row of each request.
            verify_draft_sampled: as ``draft_sampled``, -1 for drafts that must not be kept.

        Returns:
            Processed logits; tokens ``[requests, N + 1]``; how many are emitted, ``[requests]``.
        """
        sampler: Any = self.sampler
        rows = expanded_idx_mapping, expanded_local_pos
        processed = sampler.apply_sampling_params(
            logits, rows[0], idx_mapping, idx_mapping_np, pos, draft_sampled, rows[1],
            seq_lens_upper_bound_np,
        )  # fmt: skip
        given = verify_draft_sampled, cu_num_logits
        own = self._own(processed, draft_logits, *given, pos, *rows)
        return processed, *keep_own_tokens(own, *given, self.num_speculative_steps)

    def _own(
        self,
        processed: torch.Tensor,
        draft_logits: torch.Tensor | None,
        inputs: torch.Tensor,
        starts: torch.Tensor,
        pos: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_logits]``: what each row emits if it is reached. A draft that equals it is kept.

        Drawn with the random numbers of plain decoding. ``slots``, ``places``: ``[num_logits]``, of
        each row's request, and in its block.
        """
        states: Any = self.sampler.sampling_states
        return gumbel_sample(
            processed,
            slots,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,  # done by apply_sampling_params
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )


class DrafterInvariantSampler(OwnRule):
    """A draft is kept if it is the target's own token."""

    def __init__(self, sampler: Any, *others: Any, **options: Any) -> None:
        super().__init__(sampler, *others, **options)
        # FlashInfer would draw with other random numbers in steps without drafts.
        sampler.use_flashinfer = False


UNIFORM = 0x5EED0000  # domain of the hash whose bits decide about drafts
AT_ONCE = 1 << 25  # probabilities of one kind that exist at once


class RatioSampler(OwnRule):
    """vLLM's rejection sampling; on a CPU, where its kernels do not run, in torch."""

    def _verify(self, logits: torch.Tensor, *others: Any, **options: Any) -> Any:
        rule = OwnRule if logits.device.type == "cpu" else RejectionSampler
        return rule._verify(self, logits, *others, **options)

    def _own(
        self,
        processed: torch.Tensor,
        draft_logits: torch.Tensor | None,
        inputs: torch.Tensor,
        starts: torch.Tensor,
        pos: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        states: Any = self.sampler.sampling_states
        of_rows, steps = slots.long(), places.long()
        temperature = states.temperature.gpu[of_rows].float()[:, None]
        bits = murmur3(
            states.seeds.gpu[of_rows].numpy(), pos.numpy(), np.zeros(1, np.uint32), UNIFORM
        )
        uniform = (torch.from_numpy(bits.astype(np.float64))[:, 0] + 0.5) / 2**32
        drafts = behind(inputs, starts)
        is_kept = torch.zeros_like(drafts, dtype=torch.bool)
        resampled = processed.to(torch.float32, copy=True)  # of greedy requests it may be bf16
        for part in torch.arange(len(drafts)).split(max(1, AT_ONCE // processed.shape[1])):
            part = part[drafts[part] >= 0]
            target = probabilities(resampled[part], temperature[part] == 0)
            proposed = None
            if draft_logits is not None:
                of_draft = draft_logits[of_rows[part], steps[part]].float()
                heat = temperature[part]
                proposed = probabilities(of_draft / heat.where(heat > 0, 1), heat == 0)
            ratio, residual = ratio_test(target, proposed, drafts[part])
            is_kept[part] = uniform[part] < ratio
            has_rest = (residual > 0).any(1, keepdim=True)  # else rounding alone rejects
            resampled[part] = residual.log().where(has_rest, resampled[part])
        drawn = super()._own(resampled, draft_logits, inputs, starts, pos, slots, places)
        return torch.where(is_kept, drafts, drawn)


def behind(inputs: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """``[num_logits]``: the draft behind each row's input token; -1 for none that may be kept."""
    drafts = inputs.roll(-1).long()
    drafts[starts[1:].long() - 1] = -1
    return drafts


def probabilities(logits: torch.Tensor, is_greedy: torch.Tensor) -> torch.Tensor:
    """``[rows, vocab]``; all on the likeliest token in rows where ``is_greedy`` ``[rows, 1]``."""
    point = torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return point.where(is_greedy, logits.softmax(1))


def ratio_test(
    target: torch.Tensor, proposed: torch.Tensor | None, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """p(x) / q(x) of each draft, more than 1 means 1, and max(p - q, 0), to draw from in its place.

    ``target``, ``proposed``: ``[rows, vocab]``, p and q (None: 1 at each draft). Drafts:
    ``[rows]``.
    """
    at = drafts[:, None]
    if proposed is None:
        return target.gather(1, at)[:, 0], target.scatter(1, at, 0.0)
    ratio = target.gather(1, at) / proposed.gather(1, at)
    return ratio[:, 0], (target - proposed).clamp(min=0)


def keep_own_tokens(
    own: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's own tokens, up to and including the first that its draft is not equal to.

    Args:
        own: ``[num_logits]``, the target's token behind each row's input token.
        inputs: ``[num_logits]``, that input token: a request's last token, then its drafts.
        starts: ``[requests + 1]``, first row of each request; at most N + 1 rows each.

    Returns:
        ``[requests, N + 1]`` (any values behind the emitted), and how many, ``[requests]`` int32.
    """
    places = torch.arange(num_drafts + 1, device=own.device)
    rows = starts[:-1, None] + places  # [requests, N + 1]
    exists = rows < starts[1:, None]
    rows = rows.clamp(max=len(own) - 1)
    tokens = own[rows]
    is_kept = (tokens[:, :-1] == inputs[rows[:, 1:]]) & exists[:, 1:]
    return tokens, 1 + is_kept.cumprod(dim=1).sum(dim=1, dtype=torch.int32)
