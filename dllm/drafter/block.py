"""The draft block of vLLM's DFlash speculator: how long it is, and how many passes decide it.

A pass is over [last token, MASK x N] for every row. A row's block is shortened to w drafts by
hiding the keys behind them from everybody (``seq_lens``): its first w drafts are then those of a
pass over [last token, MASK x w]. The others mean nothing. The pass itself becomes no cheaper.

Of several passes each decides the positions of which the drafter is surest, so many as
``ops.schedule`` says. The next pass sees them in place of their masks.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig

from dllm.drafter.sources import SteeredBlocks
from dllm.drafter.steering import DraftPass
from dllm.drafter.step import TargetStep
from dllm.ops.schedule import reveal_counts
from dllm.ops.staging import to_device
from dllm.settings.server import options_of


class DraftBlock(SteeredBlocks):
    """Blocks as long as a pilot says, decided in one pass or in several."""

    _block_lengths: np.ndarray | None = None  # [rows] of the pass that runs; None: N drafts each

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        options, num_drafts = options_of(vllm_config).drafter, self.num_speculative_steps
        self.reveal_counts = reveal_counts(
            options.noise_schedule, num_drafts, options.denoise_steps
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        if self.steering.lengths is not None:
            self.steering.lengths.load(self.device)

    def draft(self, step: TargetStep, draft: DraftPass) -> torch.Tensor:
        self._block_lengths = self.steering.block_lengths
        try:
            return super().draft(step, draft)
        finally:
            self._block_lengths = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        if self.steering.lengths is not None:
            # Metadata is built outside of CUDA graphs: lengths are changed there.
            self.supports_decode_metadata_update = False

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Before vLLM builds the metadata, let rows end behind the last draft that is asked for."""
        if self._block_lengths is not None:
            num_reqs, size = kwargs["num_reqs"], self.num_query_per_req
            firsts = self.input_buffers.positions[: num_reqs * size : size]
            ends = firsts + 1 + to_device(self._block_lengths, firsts.device)
            self.input_buffers.seq_lens[:num_reqs] = ends.clamp(max=self.max_model_len)
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _generate_draft(
        self, num_reqs: int, num_tokens_padded: int, *others: Any, **options: Any
    ) -> None:
        """``num_reqs`` counts rows of padding, too, where a CUDA graph is recorded or replayed."""
        if len(self.reveal_counts) == 1:
            super()._generate_draft(num_reqs, num_tokens_padded, *others, **options)
            return
        # Indices of masked positions on the axis of tokens, [rows * N]. Those of a row of padding
        # are all 0: the last token of the first request, which has to keep its value.
        places = self.sample_indices[: num_reqs * self.num_speculative_steps]
        slots = self.sample_idx_mapping[: len(places)]
        # The draw of a token has the position of the one in front of it.
        at = slots, self.temperature, self.seeds, self.sample_pos[: len(places)] - 1
        drafts, confidence = self.draft_tokens[:num_reqs], self.steering.confidence[:num_reqs]
        is_masked = torch.ones_like(drafts, dtype=torch.bool)
        input_ids = self.input_buffers.input_ids
        for count in self.reveal_counts:
            hidden = self._run_model(num_tokens_padded, *others, **options)
            logits = self.compute_draft_logits(hidden[places], spec_step_idx=0)
            is_drawn = self._samples_drafts
            drawn = self._sample_coupled(logits, *at) if is_drawn else logits.argmax(-1)
            reveal_surest(drafts, confidence, is_masked, logits, drawn, count)
            tokens = drafts.masked_fill(is_masked, self.parallel_drafting_token_id)
            tokens = tokens.view(-1).to(input_ids.dtype)
            input_ids[places] = torch.where(slots < 0, input_ids[places], tokens)
        confidence.copy_(self._useful(confidence, drafts))


def reveal_surest(
    drafts: Tensor,
    confidence: Tensor,
    is_masked: Tensor,
    logits: Tensor,
    tokens: Tensor,
    count: int,
) -> None:
    """Decide, in each row, the ``count`` masked positions whose likeliest token is most probable.

    Args:
        drafts: ``[rows, N]`` int64; gets the tokens of these positions.
        confidence: ``[rows, N]`` fp32; gets the probabilities of their likeliest tokens.
        is_masked: ``[rows, N]`` bool, at least ``count`` in each row; cleared at these positions.
        logits, tokens: ``[rows * N, vocab]``, and what was drawn from them, ``[rows * N]``.
    """
    likeliest = logits.float().softmax(-1).amax(-1).view(drafts.shape)
    chosen = likeliest.masked_fill(~is_masked, -1.0).topk(count, dim=-1).indices
    drafts.scatter_(1, chosen, tokens.view(drafts.shape).gather(1, chosen))
    confidence.scatter_(1, chosen, likeliest.gather(1, chosen))
    is_masked.scatter_(1, chosen, False)
