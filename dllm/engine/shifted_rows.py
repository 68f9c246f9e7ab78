"""Shifted logits: where row i of the model's output predicts token i + 1 of the sequence.

A canvas at [start, end) is decided by the rows [start - 1, end - 1). All of them but the first are
its own. The first is that of the token in front of it:

    in a tail            it is computed in each pass, because it sees the canvas
    at the end of a block, or of a causal span   it sees no canvas. Its last hidden state is kept
                         from the causal pass over it until the next one of its request

So behind each forward pass the hidden states of canvas rows are moved down by one row. What follows
finds the logits of each canvas token in its own row, as of any other model.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.spans import Spans
from dllm.engine.state import CanvasState
from dllm.ops.staging import to_device


class ShiftedRows:
    """``like``: ``[.., hidden]``, a tensor on the model's device and in its dtype."""

    def __init__(self, state: CanvasState, like: torch.Tensor) -> None:
        self._state = state
        self._in_front = like.new_zeros(state.spare_slot + 1, like.shape[1])  # by slot

    def shift_(self, hidden_states: torch.Tensor, batch: InputBatch) -> None:
        """Writes canvas rows of ``[tokens, hidden]``. Does not wait for the device."""
        self._keep_last_rows(hidden_states, batch)
        if batch.num_draft_tokens == 0:
            return
        rows, slots = batch.logits_indices, batch.expanded_idx_mapping
        is_first = (batch.expanded_local_pos == 0)[:, None]
        before = hidden_states[(rows - 1).clamp(min=0)]
        hidden_states[rows] = torch.where(is_first, self._in_front[slots], before)

    def _keep_last_rows(self, hidden_states: torch.Tensor, batch: InputBatch) -> None:
        """Of each causal span; a deferred commit is one, too, as long as all that is scheduled."""
        count, slots = batch.num_reqs, batch.idx_mapping[: batch.num_reqs]
        spans = Spans.of_schedule(batch.num_scheduled_tokens, batch.num_draft_tokens_per_req)
        ends = batch.query_start_loc_np[1 : count + 1]
        lasts = ends - spans.canvas_widths[:count] - 1
        is_causal = spans.causal_lens[:count] > 0
        at, at_end, known = to_device(np.stack([lasts, ends - 1, is_causal]), slots.device)
        commits = self._state.commits[slots]
        kept = torch.where(
            (commits | known.bool())[:, None],
            hidden_states[torch.where(commits, at_end, at.clamp(min=0))],
            self._in_front[slots],
        )
        self._in_front[slots] = kept
