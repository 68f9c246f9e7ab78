"""Pending blocks: emitted, but their causal KV has not been written yet.

Under asynchronous scheduling a visit may be on its way when a canvas converges. It was scheduled as
one more denoise step, with as many tokens as the canvas has. Its rows are then the emitted block in
its causal pass, a *plain commit*:

    token ids        the emitted block instead of the canvas, with their plain embeddings
    attention        causal: the split point is the length of the query
    denoise step     none: the row counts as one without a canvas; its next one waits untouched
    answer           nothing is emitted, and the block's tokens are not rejected

Which rows these are is known on the device only, so everything is a choice by mask: shapes, CUDA
graphs and the host's work do not depend on it. If the block is scheduled as the head of a canvas
instead, or alone, as by the synchronous scheduler, the canvas is one.

Nothing here waits for the device.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState
from dllm.ops.staging import to_device


def find_commits(state: CanvasState, batch: InputBatch) -> torch.Tensor:
    """Which rows of a visit are plain commits: ``[R]`` bool, also kept in ``state.commits``.

    Those that hold a canvas and nothing else, while a block of their request is pending.
    """
    slots = batch.idx_mapping[: batch.num_reqs].long()
    query_lens = batch.query_start_loc[: batch.num_reqs + 1].diff()
    has_no_head = query_lens == batch.cu_num_logits.diff()
    commits = has_no_head & (state.num_pending[slots] > 0)
    state.commits[slots] = commits
    return commits


def causal_lens(state: CanvasState, batch: InputBatch) -> torch.Tensor:
    """How many tokens of each row a plain commit makes causal: all of them, or 0. ``[R]`` int32."""
    slots = batch.idx_mapping[: batch.num_reqs].long()
    query_lens = batch.query_start_loc[: batch.num_reqs + 1].diff()
    return torch.where(state.commits[slots], query_lens, 0)


def host_error(batch: InputBatch) -> torch.Tensor:
    """What to add to a sequence length that the host knows: ``[R]`` int32, at most 0.

    The host counts a canvas in flight as if it moved the position. Most do not.
    """
    believed = batch.seq_lens_cpu_upper_bound[: batch.num_reqs]
    seq_lens = batch.seq_lens[: batch.num_reqs]
    return seq_lens - to_device(believed.numpy(), seq_lens.device)


def write_block_ids(state: CanvasState, batch: InputBatch) -> torch.Tensor:
    """Put pending blocks in the place of canvases, in the batch's token ids.

    Returns:
        ``[N]`` bool, which canvas tokens of the batch these are. Behind a block that was emitted
        without its last tokens are some that nobody sees.
    """
    slots, places = batch.expanded_idx_mapping, batch.expanded_local_pos
    rows = batch.logits_indices
    is_block = state.commits[slots]
    ids = batch.input_ids[rows]
    block = state.argmax_canvas[slots, places].to(ids.dtype)
    batch.input_ids[rows] = torch.where(is_block, block, ids)
    return is_block


def without_commits(rows: CanvasRows, state: CanvasState) -> CanvasRows:
    """The canvases of a visit: plain commits count as rows of width 0."""
    return rows._replace(widths=torch.where(state.commits[rows.slots], 0, rows.widths))


def num_rejected(state: CanvasState, batch: InputBatch) -> torch.Tensor:
    """How many canvas tokens of each row keep no KV: ``[R]``.

    All of a canvas; of a plain commit those behind its block.
    """
    slots = batch.idx_mapping[: batch.num_reqs].long()
    num_kept = torch.where(state.commits[slots], state.num_pending[slots], 0)
    return batch.cu_num_logits.diff() - num_kept


def store(state: CanvasState, batch: InputBatch, num_emitted: torch.Tensor) -> None:
    """Remember which blocks are pending behind this visit: ``num_emitted`` ``[R]`` tokens each.

    A block that was pending before has its KV: it was a plain commit, or a head.
    """
    slots = batch.idx_mapping[: batch.num_reqs].long()
    state.num_pending[slots] = num_emitted.to(state.num_pending.dtype)
