"""The first token of a canvas, from the causal pass over the text in front of it.

An algorithm may ask for it (``DenoisingAlgorithm.begins_causally``): then a prompt, and each
emitted block, has a pass of its own, whose last row decides the first token of the canvas that
follows. The canvas begins with this token and masks.

A request that restricts its tokens begins with masks alone: with a grammar, edits of logits or
filters, the first token is decided on the canvas, where they are applied.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.sampler import DiffusionSampler
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.staging import to_device


class FirstTokens:
    def __init__(self, model: Any, sampler: DiffusionSampler, mask_token_id: int) -> None:
        self._model, self._sampler, self._mask = model, sampler, mask_token_id

    def write(self, hidden_states: torch.Tensor, batch: InputBatch) -> None:
        """Behind a forward pass (``[tokens, hidden]``): begin the canvases whose text is read to
        its end.
        """
        count = batch.num_reqs
        slots_np = batch.idx_mapping_np[:count]
        starts_np = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
        begins = starts_np >= batch.prefill_len_np[:count]
        sampler = self._sampler
        is_restricted = sampler.edits.is_edited[slots_np] | sampler.grammars.has_grammar[slots_np]
        begins &= ~(is_restricted | sampler.is_filtered(slots_np))
        if batch.num_draft_tokens_per_req is not None:
            begins &= batch.num_draft_tokens_per_req[:count] == 0
        if not begins.any():
            return
        lasts = batch.query_start_loc_np[1 : count + 1][begins] - 1
        rows, slots, starts = to_device(
            np.stack([lasts, slots_np[begins], starts_np[begins]]).astype(np.int64),
            hidden_states.device,
        )
        state, traces = sampler.state, sampler.traces
        logits = self._model.compute_logits(hidden_states[rows])
        keys = noise.row_keys(
            state.seeds[slots], starts, torch.zeros_like(starts), 1, noise.STREAM_GUMBEL
        )[:, 0]
        keys = torch.where(state.is_greedy[slots, None], noise.NO_KEY, keys)
        temperature = state.temperatures[slots]
        tokens = row_stats(logits, temperature, keys, None).sample
        before = state.canvas[slots]
        is_free = before[:, 0] == self._mask
        if traces.are_wanted(slots_np):
            traces.record_first(logits, tokens, temperature, slots, is_free)
        after = before.clone()
        after[:, 0] = torch.where(is_free, tokens.to(before.dtype), before[:, 0])
        if state.looks_for_ends(slots_np[begins]):
            after = state.thoughts(slots, starts).moved(before, after, self._mask)
        state.canvas[slots] = after
