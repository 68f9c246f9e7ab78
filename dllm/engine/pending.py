"""Pending blocks: emitted, but their causal KV has not been written yet.

Under asynchronous scheduling the scheduler sends the next engine step before it knows that a canvas
has converged. In that engine step the request has the same tokens once more, and the scheduler
means one more denoise step. The worker sees that the canvas starts in front of the request's last
token, and makes it the emitted block, so that its causal KV is written. This is called a *deferred
commit*:

    token ids        those of the emitted block; nothing is added to their embeddings
    attention        causal for all of the tokens
    denoise step     none: the request counts as one without a canvas, and its next canvas, which is
                     in the state already, stays as it is
    answer           no token is emitted, and the KV of the block's tokens is kept

In a model with blocks of B > 1 tokens the tail in front of the canvas belongs to the block, and
causal rows see their whole block as those of a canvas do. A block that was emitted without its last
tokens, in front of a bad word, is not whole: its KV is not kept, and its tokens are the next
canvas's tail.

Only the device knows which requests of a batch these are, and nothing here waits for it: each point
is a `torch.where` over all requests. If the scheduler does know of the block, it schedules it in
front of the next canvas or alone, and nothing of this happens.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState


def find_commits(state: CanvasState, batch: InputBatch, num_tokens: torch.Tensor) -> torch.Tensor:
    """``[R]`` bool, also in ``state.commits``; ``num_tokens`` ``[slots]`` with emitted ones."""
    slots, ends = batch.idx_mapping[: batch.num_reqs], batch.seq_lens[: batch.num_reqs]
    widths = batch.cu_num_logits.diff()
    commits = ends - widths < num_tokens[slots]
    if not np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1]).all():
        commits &= widths > 0
    state.commits[slots] = commits
    return commits


def write_block_ids(state: CanvasState, batch: InputBatch) -> None:
    """Behind a block that was emitted without its last tokens are some that nobody sees."""
    slots, rows = batch.expanded_idx_mapping, batch.logits_indices
    block = state.argmax_canvas[slots, batch.expanded_local_pos].to(batch.input_ids.dtype)
    batch.input_ids[rows] = torch.where(state.commits[slots], block, batch.input_ids[rows])


def without_commits(rows: CanvasRows, state: CanvasState) -> CanvasRows:
    """The canvases of an engine step: deferred commits count as rows of width 0."""
    return rows._replace(widths=torch.where(state.commits[rows.slots], 0, rows.widths))
