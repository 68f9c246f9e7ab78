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

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Denoised
from dllm.engine.state import CanvasState
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.staging import to_device
from dllm.settings.request import traced

# What is recorded of a token: the step, the log-probabilities at temperature 1 and at that of the
# step, and the entropy at that of the step.
COLUMNS = 4
ROWS_AT_ONCE = 256  # of logits that are copied; no result depends on it


class BlockTraces:
    """The records of unfinished canvases, of requests that ask for them.

    Args:
        canvases: ``[slots, C]``, for the shape and the device; the last slot is the spare one.
        stays: whether what stands on a canvas and is no mask stays (``Family.decides_for_good``).

    Attributes:
        records: ``[slots, C, COLUMNS]`` fp32; NaN where there is no probability.
    """

    def __init__(self, canvases: torch.Tensor, stays: bool) -> None:
        self._stays = stays
        self._is_traced = np.zeros(len(canvases), dtype=bool)
        self._was_kept = torch.zeros_like(canvases, dtype=torch.bool)
        nothing = [0.0, *[torch.nan] * (COLUMNS - 1)]
        self._nothing = torch.tensor(nothing, device=canvases.device)
        self.records = self._nothing.repeat(*canvases.shape, 1)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Store whether the new request of this slot is traced."""
        self._is_traced[slot] = traced(params) is not None
        if self._is_traced[slot]:
            self.records[slot] = self._nothing
            self._was_kept[slot].zero_()

    def are_wanted(self, slots: np.ndarray) -> bool:
        """Whether the request of one of these slots is traced."""
        return bool(self._is_traced[slots].any())

    def rows_of(self, batch: InputBatch) -> torch.Tensor | None:
        """The rows of logits of traced requests, ``[n]``; None if there are none."""
        slots = batch.idx_mapping_np[: batch.num_reqs]
        if not self.are_wanted(slots):
            return None
        widths = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1])
        index = np.flatnonzero(np.repeat(self._is_traced[slots], widths))
        return to_device(index, self.records.device)

    def record(
        self,
        logits: torch.Tensor,
        some: torch.Tensor,
        ids: torch.Tensor,
        pins: torch.Tensor | None,
        step: Denoised,
        state: CanvasState,
        rows: CanvasRows,
    ) -> None:
        """Record the tokens that a step decides; does not wait for the device.

        Args:
            logits: ``[n, V]`` fp32, the model's own, of the rows ``some`` ``[n]``; not changed.
            ids: ``[N]``, the canvas tokens that entered the model.
            pins: ``[N, 1]`` bool, which of these the request fixed; None: nobody pins.
            state: before the step.
        """
        row, place = rows.row_of[some], rows.place[some]
        slots, ends = rows.slots[row], step.converged[row]
        is_kept = step.accepted[row, place]
        token = torch.where(ends, step.argmax_canvas[row, place], step.canvas[row, place])
        is_new = token != ids[some]
        if not self._stays:
            is_new |= ~self._was_kept[slots, place]
            if pins is not None:  # what stands there is not the model's
                is_kept &= ~pins[some, 0]
                is_new &= ~(pins[some, 0] & state.holds_pins[slots])
        is_there = rows.widths[row] > 0
        is_new &= (is_kept | ends) & is_there
        temperature = step.temperature[some]
        found = _values(logits, token, temperature, state.steps_done[slots] + 1)
        before = self.records[slots, place]
        self.records[slots, place] = torch.where(is_new[:, None], found, before)
        was_kept = self._was_kept[slots, place]
        self._was_kept[slots, place] = torch.where(is_there, is_kept & ~ends, was_kept)

    def record_first(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: torch.Tensor,
        slots: torch.Tensor,
        is_new: torch.Tensor,
    ) -> None:
        """Record the first tokens of canvases, which no denoise step decides.

        Args:
            logits: ``[n, V]``; tokens, temperature, slots: ``[n]``.
            is_new: ``[n]`` bool, which of them are decided so.
        """
        found = _values(logits, tokens, temperature, torch.zeros_like(slots))
        self.records[slots, 0] = torch.where(is_new[:, None], found, self.records[slots, 0])

    def end(self, slots: torch.Tensor, converged: torch.Tensor) -> None:
        """Forget the records of canvases that have converged: ``slots``, ``converged`` ``[R]``."""
        before = self.records[slots]
        self.records[slots] = torch.where(converged[:, None, None], self._nothing, before)


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
