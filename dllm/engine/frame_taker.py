"""FrameTaker: in the worker, packs the canvases of watched requests after each denoise step.

It is a module of its own because ``engine.frames`` is imported by the API server, which has no
worker's modules.
"""

from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.sampling_params import SamplingParams

from dllm.engine.frames import StepFrames
from dllm.engine.steps import StepRecord
from dllm.ops.staging import to_device
from dllm.settings.request import STREAM, STREAM_EVERY, traced


class FrameTaker:
    def __init__(self, num_slots: int) -> None:
        self._every = ["block"] * num_slots
        self._is_watched = np.zeros(num_slots, dtype=bool)
        self._is_shown = np.zeros(num_slots, dtype=bool)  # unfinished canvases, too
        self._pending: list[StepFrames] = []

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """All tensor-parallel ranks have the same canvases; the scheduler listens to the first."""
        extra = params.extra_args or {}
        is_shown = extra.get(STREAM) is not None
        is_watched = is_shown or traced(params) is not None
        is_watched &= get_tp_group().is_first_rank
        self._is_watched[slot], self._is_shown[slot] = is_watched, is_shown
        self._every[slot] = extra.get(STREAM_EVERY) or "pass" if is_shown else "block"

    def read(self, record: StepRecord, canvases: torch.Tensor, traces: torch.Tensor | None) -> None:
        """Pack what a step did to watched canvases ``[slots, C]``; does not wait for the device."""
        batch, num_reqs = record.tile.batch, record.tile.batch.num_reqs
        slots = batch.idx_mapping_np[:num_reqs]
        if not self._is_watched[slots].any():
            return
        widths = np.diff(batch.cu_num_logits_np[: num_reqs + 1])
        is_wanted = self._is_watched[slots] & (widths > 0)
        if canvases.device.type == "cpu":  # elsewhere nobody knows yet what has converged
            is_wanted &= self._is_shown[slots] | record.denoised.converged.numpy()[:num_reqs]
        index = np.flatnonzero(is_wanted)
        if len(index) == 0:
            return
        packed = _packed(index, record, canvases, traces)
        every = [self._every[slot] for slot in slots[index]]
        self._pending.append(StepFrames([batch.req_ids[i] for i in index], every, packed))

    def take(self) -> list[StepFrames]:
        """Frames of an engine step. Their copies are complete when vLLM's, queued later, are."""
        taken, self._pending = self._pending, []
        return taken


def _packed(
    index: np.ndarray, record: StepRecord, canvases: torch.Tensor, traces: torch.Tensor | None
) -> "np.ndarray | torch.Tensor":
    """``StepFrames.packed`` of the requests ``index`` ``[n]``.

    On a CPU in numpy: operations of torch take ten times as long for so little data.
    """
    rows, step = record.tile.rows, record.denoised
    on_host = canvases.device.type == "cpu"
    at: Any = index if on_host else to_device(index, canvases.device)

    def of(column: torch.Tensor) -> Any:
        return column.numpy() if on_host else column

    lines = (  # (of each place of a canvas, of the canvas)
        (of(canvases)[of(rows.slots)[at]], of(rows.starts)[at]),
        (of(step.argmax_canvas)[at], of(step.steps_done)[at]),
        (of(step.stats.entropy)[of(rows.padded)[at]], of(rows.widths)[at]),
        (of(step.accepted)[at], of(step.converged)[at]),
    )
    shape = len(index), len(lines) + 4 * (traces is not None), canvases.shape[1] + 1
    packed: Any = np.zeros(shape, np.float32) if on_host else torch.zeros(shape, device=at.device)
    for line, (of_places, of_canvas) in enumerate(lines):
        packed[:, line, :-1], packed[:, line, -1] = of_places, of_canvas
    if traces is not None:
        packed[:, len(lines) :, :-1] = of(traces)[at].swapaxes(1, 2)
    if on_host:
        return packed
    pinned = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
    return pinned.copy_(packed, non_blocking=True)
