"""Traces: in which denoise step each token of a canvas was decided, and how likely it was then.

A token is decided in the last step that changed what stands at its position to the token that is
emitted. With masks that is the step that replaced the mask, or the last one that edited the token.
With uniform noise it is the step in which the token was accepted and has stayed on the canvas; a
token that is not on the canvas when the last step begins is decided by the last step. Steps count
from 1 in each canvas. Step 0 is before the first one: a token that the request gives, without
probabilities, and the first token of a canvas where ``engine.first_token`` decides it.

Probabilities are those of the model itself: of its logits before any edit, filter or grammar.
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.state import CanvasState
from dllm.engine.steps import StepRecord
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.staging import to_device
from dllm.settings.request import traced

# What is recorded of a token: the step, the log-probabilities at temperature 1 and at that of the
# step, and the entropy at that of the step.
COLUMNS = 4
ROWS_AT_ONCE = 256  # of logits that are copied; no result depends on it


class BlockTraces:
    """``stays``: what is no mask stays on a canvas (``DenoisingAlgorithm.decides_for_good``)."""

    def __init__(self, state: CanvasState, stays: bool) -> None:
        canvases = state.canvas
        self._stays, self._holds_pins = stays, state.holds_pins
        self._is_traced = np.zeros(len(canvases), dtype=bool)
        self._was_kept = torch.zeros_like(canvases, dtype=torch.bool)
        nothing = [0.0, *[torch.nan] * (COLUMNS - 1)]
        self._nothing = torch.tensor(nothing, device=canvases.device)
        # [slots, C, COLUMNS] fp32; NaN where there is no probability.
        self._records = self._nothing.repeat(*canvases.shape, 1)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self._is_traced[slot] = traced(params) is not None
        if self._is_traced[slot]:
            self._records[slot] = self._nothing
            self._was_kept[slot].zero_()

    def are_wanted(self, slots: np.ndarray) -> bool:
        return bool(self._is_traced[slots].any())

    def rows_of(self, batch: InputBatch) -> torch.Tensor | None:
        """The rows of logits of traced requests, ``[n]``; None if there is none."""
        slots = batch.idx_mapping_np[: batch.num_reqs]
        widths = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1])
        index = np.flatnonzero(np.repeat(self._is_traced[slots], widths))
        return to_device(index, self._records.device) if len(index) else None

    def read(self, record: StepRecord) -> torch.Tensor | None:
        """Trace the tokens that a step decides, ``[R, C, COLUMNS]``; does not wait for the device.

        What is known of canvases that have converged is forgotten.
        """
        tile, step, rows = record.tile, record.denoised, record.tile.rows
        some, unedited = tile.traced, record.unedited
        if some is None or unedited is None:
            return None
        row, place = rows.request_of[some], rows.place[some]
        slots, ends = rows.slots[row], step.converged[row]
        is_kept = step.accepted[row, place]
        token = torch.where(ends, step.argmax_canvas[row, place], step.canvas[row, place])
        is_new = token != record.ids[some]
        if not self._stays:
            is_new |= ~self._was_kept[slots, place]
            if tile.is_pinned is not None:  # what stands there is not the model's
                is_pinned = tile.is_pinned[some, 0]
                is_kept &= ~is_pinned
                is_new &= ~(is_pinned & self._holds_pins[slots])
        is_there = rows.widths[row] > 0
        is_new &= (is_kept | ends) & is_there
        found = _values(unedited, token, step.temperature[some], step.steps_done[row])
        before = self._records[slots, place]
        self._records[slots, place] = torch.where(is_new[:, None], found, before)
        was_kept = self._was_kept[slots, place]
        self._was_kept[slots, place] = torch.where(is_there, is_kept & ~ends, was_kept)
        shown = self._records[rows.slots]
        over = step.converged[:, None, None]
        self._records[rows.slots] = torch.where(over, self._nothing, shown)
        return shown

    def record_first(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: torch.Tensor,
        slots: torch.Tensor,
        is_new: torch.Tensor,
    ) -> None:
        """First tokens, which no denoise step decides: ``logits`` ``[n, V]``, else ``[n]``."""
        found = _values(logits, tokens, temperature, torch.zeros_like(slots))
        self._records[slots, 0] = torch.where(is_new[:, None], found, self._records[slots, 0])


def _values(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """The records of n tokens, ``[n, COLUMNS]``."""
    parts = []
    for few in torch.arange(len(tokens), device=tokens.device).split(ROWS_AT_ONCE):
        x, heat = logits[few], temperature[few]
        no_keys = torch.full((len(few), 2), noise.NO_KEY, device=few.device)
        logit = x.gather(1, tokens[few, None].long())[:, 0]
        plain = row_stats(x, torch.ones_like(heat), no_keys, None, None)
        at_heat = row_stats(x, heat, no_keys, None, None)
        of_columns = (
            steps[few].float(),
            logit - plain.peak - plain.log_z,
            (logit - at_heat.peak) / heat - at_heat.log_z,
            at_heat.entropy,
        )
        parts.append(torch.stack(of_columns, dim=1))
    return torch.cat(parts)
