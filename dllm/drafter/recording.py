"""Connects vLLM's workers with the recorder: which worker records, and what it is given."""

from pathlib import Path

import numpy as np
import torch
from vllm.config import VllmConfig

from dllm.drafter.pair import drafter_options
from dllm.drafter.recorder import RecordedStep, Recorder
from dllm.drafter.step import TargetStep


def make_recorder(vllm_config: VllmConfig) -> Recorder | None:
    """The recorder of this worker; None if the server does not record, or another worker does.

    All workers of a tensor-parallel group have the same hidden states, so only the first one
    records. The data-parallel groups divide ``record_mb`` among them.
    """
    options, parallel = drafter_options(vllm_config), vllm_config.parallel_config
    if options.record is None or parallel.rank % parallel.tensor_parallel_size:
        return None
    max_bytes = options.record_mb * 1_000_000 // parallel.data_parallel_size
    return Recorder(Path(options.record), max_bytes, f"worker{parallel.data_parallel_rank}")


def recorded_step(step: TargetStep) -> RecordedStep:
    """A target step for the recorder: all on the host except the hidden states.

    Waits for the device.
    """
    batch = step.batch
    firsts = torch.from_numpy(batch.query_start_loc_np[: batch.num_reqs]).to(batch.positions.device)
    sampled = step.last_sampled.view(-1)[batch.idx_mapping].cpu().numpy()
    drafts = batch.num_draft_tokens_per_req
    verified = np.zeros(batch.num_reqs, dtype=np.int64) if drafts is None else drafts
    return RecordedStep(
        requests=batch.req_ids,
        starts=batch.positions[firsts].cpu().numpy(),
        lengths=batch.num_scheduled_tokens,
        kept=batch.num_scheduled_tokens - step.num_rejected.cpu().numpy(),
        prompts=batch.prefill_len_np,
        verified=np.where(batch.is_prefilling_np, 0, verified),
        last_sampled=np.where(step.num_sampled.cpu().numpy() > 0, sampled, -1),
        tokens=batch.input_ids[: batch.num_tokens].cpu().numpy(),
        features=step.features(),
    )
