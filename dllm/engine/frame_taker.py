"""FrameTaker: in the worker, packs the canvases of watched requests after each denoise step.

Where nobody watches it costs one comparison (``are_wanted``). It is a module of its own
because ``engine.frames`` is imported by the API server, which has no worker's modules.
"""

import numpy as np
import torch
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Denoised
from dllm.engine.frames import StepFrames
from dllm.ops.staging import to_device
from dllm.settings.request import STREAM, STREAM_EVERY, traced


class FrameTaker:
    """In the worker: copies the canvases of watched requests, if there are any."""

    def __init__(self, num_slots: int) -> None:
        self._every: list[str | None] = [None] * num_slots
        self._is_watched = np.zeros(num_slots, dtype=bool)
        self._is_shown = np.zeros(num_slots, dtype=bool)  # unfinished canvases, too
        self._num_watched = 0  # slots; that of an ended request counts until it is used again
        self._pending: list[StepFrames] = []

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Store whether the new request of this slot is watched.

        All tensor-parallel ranks have the same canvases; the scheduler listens to the first.
        """
        extra = params.extra_args or {}
        is_shown = extra.get(STREAM) is not None
        is_watched = is_shown or traced(params) is not None
        is_watched &= get_tp_group().is_first_rank
        self._num_watched += int(is_watched) - int(self._is_watched[slot])
        self._is_watched[slot], self._is_shown[slot] = is_watched, is_shown
        every = extra.get(STREAM_EVERY) or "pass" if is_shown else "block"
        self._every[slot] = every if is_watched else None

    def are_wanted(self, input_batch: InputBatch) -> bool:
        """Whether a request of the batch is watched."""
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        return self._num_watched > 0 and bool(self._is_watched[slots].any())

    def take(
        self,
        rows: CanvasRows,
        step: Denoised,
        steps_before: torch.Tensor,
        records: torch.Tensor | None,
        input_batch: InputBatch,
    ) -> None:
        """Pack what a pass did; does not wait for the device.

        Args:
            step: what the family decided.
            records: those of ``engine.traces``, ``[slots, C, 4]``; None if nobody is traced.
            steps_before: ``[slots]``, denoise steps that each slot's canvas had taken before.
        """
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        widths = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        is_wanted = self._is_watched[slots] & (widths > 0)
        on_host = rows.slots.device.type == "cpu"
        if on_host:  # elsewhere nobody knows yet which canvases have converged
            is_wanted &= self._is_shown[slots] | step.converged.numpy()
        index = np.flatnonzero(is_wanted)
        if len(index) == 0:
            return
        pack = _pack_on_host if on_host else _pack_on_device
        packed = pack(index, rows, step, steps_before, records)
        every = [str(self._every[slot]) for slot in slots[index]]
        self._pending.append(StepFrames([input_batch.req_ids[i] for i in index], every, packed))

    def attach(self, answer: ModelRunnerOutput) -> None:
        """Send the frames of a visit with the worker's answer.

        Their copies were queued before vLLM's own, so they are complete when those are.
        """
        if self._pending:
            answer.canvas_frames, self._pending = self._pending, []  # type: ignore[attr-defined]


def _pack_on_host(
    index: np.ndarray,
    rows: CanvasRows,
    step: Denoised,
    steps_before: torch.Tensor,
    records: torch.Tensor | None,
) -> np.ndarray:
    """In numpy: operations of torch take ten times as long for so little data."""
    slots, width = rows.slots.numpy()[index], rows.widths.numpy()[index]
    num_lines = 4 if records is None else 8
    packed = np.zeros((len(index), num_lines, step.canvas.shape[1] + 1), dtype=np.float32)
    packed[:, 0, :-1] = step.canvas.numpy()[index]
    packed[:, 1, :-1] = step.argmax_canvas.numpy()[index]
    packed[:, 2, :-1] = step.stats.entropy.numpy()[rows.padded.numpy()[index]]
    packed[:, 3, :-1] = step.accepted.numpy()[index]
    packed[:, 0, -1] = rows.seq_lens.numpy()[index] - width
    packed[:, 1, -1] = steps_before.numpy()[slots] + 1
    packed[:, 2, -1] = width
    packed[:, 3, -1] = step.converged.numpy()[index]
    if records is not None:
        packed[:, 4:, :-1] = records.numpy()[slots].swapaxes(1, 2)
    return packed


def _pack_on_device(
    index: np.ndarray,
    rows: CanvasRows,
    step: Denoised,
    steps_before: torch.Tensor,
    records: torch.Tensor | None,
) -> torch.Tensor:
    """The same on a GPU, and a copy to pinned memory that nobody waits for here."""
    at = to_device(index, rows.slots.device)
    about = (
        (rows.seq_lens - rows.widths)[at],
        steps_before[rows.slots[at]] + 1,
        rows.widths[at],
        step.converged[at],
    )
    parts = (
        step.canvas[at],
        step.argmax_canvas[at],
        step.stats.entropy[rows.padded[at]],
        step.accepted[at],
    )
    columns = [
        torch.cat((part.float(), last.float()[:, None]), dim=1)
        for part, last in zip(parts, about, strict=True)
    ]
    packed = torch.stack(columns, dim=1)
    if records is not None:
        traced_lines = F.pad(records[rows.slots[at]].transpose(1, 2), (0, 1))
        packed = torch.cat((packed, traced_lines), dim=1)
    on_host = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
    return on_host.copy_(packed, non_blocking=True)
