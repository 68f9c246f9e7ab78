"""Drafts that the scheduler has: of draft workers, or looked up in a request's own text.

They ride in the schedule (``SchedulerOutput.scheduled_spec_decode_tokens``) to every rank, and are
copied to where vLLM's model runner reads them.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from dllm.ops.staging import to_device


class ScheduledDrafts(BaseSpeculator):
    """The speculator of a server on which nobody else drafts: it proposes nothing."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are points: a target's own token is one of them, or it is not

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        num_seqs = vllm_config.scheduler_config.max_num_seqs
        shape = num_seqs, vllm_config.num_speculative_tokens
        self._nothing = torch.zeros(shape, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """There is no graph."""

    def capture(self) -> None:
        """There is no graph."""

    def propose(self, input_batch: InputBatch, *others: Any, **options: Any) -> torch.Tensor:
        """Places for drafts, ``[rows, N]``; nothing is proposed."""
        return self._nothing[: input_batch.num_reqs]


def take_scheduled(
    states: RequestState, scheduled: SchedulerOutput, draft_logits: torch.Tensor | None = None
) -> None:
    """Copy the drafts of a schedule to ``states.draft_tokens``, ``[slots, N]``.

    ``draft_logits``: ``[slots, N, vocab]``, what drafts were drawn from, where it is kept.
    """
    drafts = {
        states.req_id_to_index[req_id]: tokens
        for req_id, tokens in scheduled.scheduled_spec_decode_tokens.items()
        if req_id in states.req_id_to_index and tokens[0] >= 0  # else they are on the device
    }
    if not drafts:
        return
    places = states.draft_tokens
    of_host = np.zeros((len(drafts), places.shape[1]), np.int64)
    for row, tokens in zip(of_host, drafts.values(), strict=True):
        row[: len(tokens)] = tokens
    slots, rows = (to_device(one, places.device) for one in (np.array([*drafts]), of_host))
    places[slots] = rows.to(places.dtype)
    if draft_logits is not None:
        draft_logits.index_fill_(0, slots, -torch.inf)
        at = slots[:, None], torch.arange(rows.shape[1], device=rows.device), rows
        draft_logits.index_put_(at, draft_logits.new_zeros(()))
