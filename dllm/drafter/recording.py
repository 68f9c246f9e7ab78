"""From a step of vLLM to the recorder: which worker records where, and what it is given."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.drafter.pair import drafter_options
from dllm.drafter.recorder import RecordedStep, Recorder


def make_recorder(vllm_config: VllmConfig) -> Recorder | None:
    """The recorder of this worker, if the server records and this is the worker that does.

    Workers of one tensor-parallel group have the same hidden states: the first one records. Groups
    share the bytes.
    """
    options, parallel = drafter_options(vllm_config), vllm_config.parallel_config
    if options.record is None or parallel.rank % parallel.tensor_parallel_size:
        return None
    max_bytes = options.record_mb * 1_000_000 // parallel.data_parallel_size
    return Recorder(Path(options.record), max_bytes, f"worker{parallel.data_parallel_rank}")


def recorded_step(
    batch: InputBatch,
    hidden_states: Sequence[torch.Tensor],
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
) -> RecordedStep:
    """One step of the target, on the host but for the hidden states; waits for the device.

    Args: as ``Drafter.propose``.
    """
    firsts = torch.from_numpy(batch.query_start_loc_np[: batch.num_reqs]).to(batch.positions.device)
    sampled = last_sampled.view(-1)[batch.idx_mapping].cpu().numpy()
    drafts = batch.num_draft_tokens_per_req
    verified = np.zeros(batch.num_reqs, dtype=np.int64) if drafts is None else drafts
    return RecordedStep(
        requests=batch.req_ids,
        starts=batch.positions[firsts].cpu().numpy(),
        lengths=batch.num_scheduled_tokens,
        kept=batch.num_scheduled_tokens - num_rejected.cpu().numpy(),
        prompts=batch.prefill_len_np,
        verified=np.where(batch.is_prefilling_np, 0, verified),
        last_sampled=np.where(num_sampled.cpu().numpy() > 0, sampled, -1),
        tokens=batch.input_ids[: batch.num_tokens].cpu().numpy(),
        features=torch.cat(list(hidden_states), dim=-1)[: batch.num_tokens],
    )
