"""The speculator of a target with remote drafts: it proposes nothing, and takes what is scheduled.

Drafts ride in the schedule (``SchedulerOutput.scheduled_spec_decode_tokens``) to every rank, and
are copied to where vLLM's model runner reads them.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState


class RemoteDrafts(BaseSpeculator):
    """The speculator that ``--speculative-config`` names: method "custom_class", this as model."""

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


def take_scheduled(states: RequestState, scheduled: SchedulerOutput) -> None:
    """Copy the drafts of a schedule to ``states.draft_tokens``, ``[slots, N]``."""
    drafts = {
        states.req_id_to_index[req_id]: tokens
        for req_id, tokens in scheduled.scheduled_spec_decode_tokens.items()
        if req_id in states.req_id_to_index
    }
    if not drafts:
        return
    places = states.draft_tokens
    rows = torch.zeros((len(drafts), places.shape[1]), dtype=places.dtype)
    for row, tokens in zip(rows, drafts.values(), strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    slots = torch.tensor(list(drafts), device=places.device)
    places[slots] = rows.to(places.device, non_blocking=True)
