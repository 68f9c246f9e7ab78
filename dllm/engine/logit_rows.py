"""Tiles of a batch whose logits exist at once: those of 64 canvases of 256 tokens would need 17 GB.

A tile is some whole canvases. The sampler finishes the denoise step of one tile before it computes
the logits of the next. A canvas's step does not depend on other canvases, so tiles change nothing
except how much memory a step needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import CHUNK_SIZE

from dllm.attention.ragged import spread, starts_of
from dllm.engine.logprobs import joined
from dllm.ops.staging import to_device
from dllm.settings.server import options_of

LEAST_WORKSPACE_MIB = 1024  # by default


def rows_at_once(vllm_config: VllmConfig) -> int:
    """How many rows of fp32 logits fit into ``logits_workspace_mib`` (``settings.server``).

    At least ``CHUNK_SIZE``: vLLM asks for the logits of so many prompt tokens at once when it
    computes prompt logprobs, and needs them as a tensor.
    """
    option = options_of(vllm_config).logits_workspace_mib
    workspace_mib = _workspace_mib() if option == "auto" else option
    row_bytes = 4 * vllm_config.model_config.get_vocab_size()
    return max(CHUNK_SIZE, (workspace_mib << 20) // row_bytes)


def _workspace_mib() -> int:
    """Of all memory, not of what is free: every rank has to cut a batch at the same places."""
    if not current_platform.is_cuda():
        return LEAST_WORKSPACE_MIB
    return max(LEAST_WORKSPACE_MIB, current_platform.get_device_total_memory() // 32 >> 20)


def tiles_of_batch(
    input_batch: InputBatch, rows_at_once: int
) -> Iterator[tuple[slice, InputBatch]]:
    """For each tile its rows of logits, and a batch of its requests alone."""
    if input_batch.num_draft_tokens <= rows_at_once:
        yield slice(None), input_batch
        return
    starts = input_batch.cu_num_logits_np[: input_batch.num_reqs + 1]
    for first, end in tile_bounds(starts, rows_at_once):
        yield slice(int(starts[first]), int(starts[end])), part_of_batch(input_batch, first, end)


def tile_bounds(starts: np.ndarray, rows_at_once: int) -> list[tuple[int, int]]:
    """Requests [first, end), at least one in each. ``starts``: ``[requests + 1]``."""
    bounds, first = [], 0
    while first < len(starts) - 1:
        fitting = int(np.searchsorted(starts, starts[first] + rows_at_once, side="right")) - 1
        end = max(fitting, first + 1)
        bounds.append((first, end))
        first = end
    return bounds


def part_of_batch(input_batch: InputBatch, first: int, end: int) -> InputBatch:
    """The requests [first, end). Only the fields that the sampler reads are cut: ``input_ids`` and
    ``positions``, into which ``logits_indices`` points, stay those of the whole batch.
    """
    requests = slice(first, end)
    starts = input_batch.cu_num_logits_np[first : end + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    per_req = input_batch.num_draft_tokens_per_req
    return replace(
        input_batch,
        num_reqs=end - first,
        req_ids=input_batch.req_ids[requests],
        num_draft_tokens=rows.stop - rows.start,
        idx_mapping=input_batch.idx_mapping[requests],
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        seq_lens=input_batch.seq_lens[requests],
        seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[requests],
        cu_num_logits=input_batch.cu_num_logits[first : end + 1] - rows.start,
        cu_num_logits_np=starts - rows.start,
        num_draft_tokens_per_req=per_req if per_req is None else per_req[requests],
        expanded_idx_mapping=input_batch.expanded_idx_mapping[rows],
        expanded_local_pos=input_batch.expanded_local_pos[rows],
        logits_indices=input_batch.logits_indices[rows],
    )


def leave_out_rows(input_batch: InputBatch, num_rows: np.ndarray) -> None:
    """Let canvases have logits for their first ``num_rows`` ``[slots]`` alone.

    Called when the attention metadata of the whole canvases exists.
    """
    num_reqs = input_batch.num_reqs
    starts = input_batch.cu_num_logits_np[: num_reqs + 1]
    widths = np.diff(starts)
    kept = np.minimum(widths, num_rows[input_batch.idx_mapping_np[:num_reqs]])
    if np.array_equal(kept, widths):
        return
    new_starts = starts_of(kept).astype(starts.dtype)
    rows, offsets = spread(new_starts)
    device = input_batch.logits_indices.device
    at = to_device(starts[rows] + offsets, device)
    input_batch.num_draft_tokens = len(rows)
    input_batch.cu_num_logits_np = new_starts
    input_batch.cu_num_logits = to_device(new_starts, device)
    input_batch.expanded_idx_mapping = input_batch.expanded_idx_mapping[at]
    input_batch.expanded_local_pos = input_batch.expanded_local_pos[at]
    input_batch.logits_indices = input_batch.logits_indices[at]


def joined_outputs(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    if len(parts) == 1:
        return parts[0]
    num_nans = [part.num_nans for part in parts if part.num_nans is not None]
    return SamplerOutput(
        sampled_token_ids=torch.cat([part.sampled_token_ids for part in parts]),
        logprobs_tensors=joined(parts),
        num_nans=torch.cat(num_nans) if num_nans else None,
        num_sampled=torch.cat([part.num_sampled for part in parts]),
        num_rejected=torch.cat([part.num_rejected for part in parts]),
    )
