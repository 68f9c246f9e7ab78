"""Which drafts are kept: those that are the target's own tokens.

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
(1 - d) / (1 + d) or more, d being the total variation between the two distributions; rejection
sampling keeps 1 - d, but its text depends on the drafts.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dllm.drafter.pair import refuse_other_rules


class DrafterInvariantSampler(RejectionSampler):
    """vLLM's sampler of steps that verify drafts, with the rule above instead of a ratio test.

    Raises:
        ValueError: as ``refuse_other_rules``.
    """

    def __init__(
        self, sampler: Any, spec_config: SpeculativeConfig, *others: Any, **options: Any
    ) -> None:
        super().__init__(sampler, spec_config, *others, **options)
        refuse_other_rules(spec_config, self.watermark_key is not None)
        # FlashInfer would draw with other random numbers in steps without drafts.
        sampler.use_flashinfer = False

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
        """Sample the rows of some requests.

        Args:
            logits: ``[num_logits, vocab]``: for each request a row behind its last token and one
                behind each draft.
            draft_sampled: ``[num_logits]``, the input token of each row; of the rows behind the
                first these are the drafts.
            pos: ``[num_logits]``, position of that input token.
            cu_num_logits: ``[requests + 1]``, first row of each request.
            verify_draft_sampled: as ``draft_sampled``, -1 for drafts that must not be kept.

        Returns:
            The processed logits; tokens ``[requests, N + 1]``; how many of them are emitted,
            ``[requests]``.
        """
        sampler: Any = self.sampler
        processed = sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        own = gumbel_sample(
            processed,
            expanded_idx_mapping,
            sampler.sampling_states.temperature.gpu,
            sampler.sampling_states.seeds.gpu,
            pos,
            apply_temperature=False,  # done by apply_sampling_params
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )
        tokens, num_emitted = keep_own_tokens(
            own, verify_draft_sampled, cu_num_logits, self.num_speculative_steps
        )
        return processed, tokens, num_emitted


def keep_own_tokens(
    own: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's own tokens, up to and including the first that its draft is not equal to.

    Args:
        own: ``[num_logits]``, the target's token behind each row's input token.
        inputs: ``[num_logits]``, that input token: a request's last token, then its drafts.
        starts: ``[requests + 1]``, first row of each request; at most ``num_drafts + 1`` rows each.

    Returns:
        Tokens ``[requests, num_drafts + 1]`` (any values behind the emitted ones), and how many are
        emitted, ``[requests]`` int32.
    """
    places = torch.arange(num_drafts + 1, device=own.device)
    rows = starts[:-1, None] + places  # [requests, N + 1]
    exists = rows < starts[1:, None]
    rows = rows.clamp(max=len(own) - 1)
    tokens = own[rows]
    is_kept = (tokens[:, :-1] == inputs[rows[:, 1:]]) & exists[:, 1:]
    return tokens, 1 + is_kept.cumprod(dim=1).sum(dim=1, dtype=torch.int32)
