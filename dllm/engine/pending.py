"""Pending blocks: emitted, but their causal KV has not been written yet.

Under asynchronous scheduling the scheduler sends the next visit before it knows that a canvas has
converged. In that visit the request has as many tokens as its canvas, and the scheduler means one
more denoise step. The worker uses these tokens for something else: they become the emitted block,
so that its causal KV is written. This is called a *plain commit*:

    token ids        those of the emitted block; nothing is added to their embeddings
    attention        causal for all of the tokens
    denoise step     none: the request counts as one without a canvas, and its next canvas, which is
                     in the state already, stays as it is
    answer           no token is emitted, and the KV of the block's tokens is kept

Only the device knows which requests of a batch these are. So each of the points above is a
`torch.where` over all requests: what the host does, and the shapes of tensors, are the same for any
outcome. If the scheduler does know of the block, it schedules it in front of the next canvas or
alone, and nothing of this happens.

Nothing here waits for the device.
"""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState


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
