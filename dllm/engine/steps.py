"""What the engine knows of a denoise step: before it a ``Tile``, behind it a ``StepRecord``."""

from typing import Any, NamedTuple

from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.engine.algorithm import Denoised
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.edits import PreparedEdits
from dllm.engine.grammars import Written
from dllm.ops.filters import RowFilters


class Tile(NamedTuple):
    """Canvases whose logits exist at once, and what the host decides about them for an engine step.

    Attributes:
        logit_rows: their rows among all logits of the batch.
        batch: their requests alone.
        rows: where the canvases are in it; at least two, of which the last may be empty.
        traced: rows of logits whose tokens are traced, ``[n]``; None if nobody asks.
        is_read_only: ``[N]`` bool, rows of read-only requests; None if nobody asks for logprobs.
        is_pinned: ``[N, 1]`` bool, rows whose input token is a pin; None if nobody pins.
        filters: top-k, top-p and min-p; None if no request uses them.
        edits: what ``LogitEdits.prepare`` returned for the requests.
        grammars: what ``CanvasGrammars.prepare`` returned for them.
    """

    logit_rows: slice
    batch: InputBatch
    rows: CanvasRows
    traced: Tensor | None
    is_read_only: Tensor | None
    is_pinned: Tensor | None
    filters: RowFilters | None
    edits: PreparedEdits | None
    grammars: Any


class StepRecord(NamedTuple):
    """What a denoise step did to the canvases of a tile.

    The state of the next step is written from it, and logprobs, traces and frames are read from it.

    Attributes:
        ids: ``[N]`` int64, the canvas tokens that entered the model.
        unedited: ``[n, V]`` fp32, the model's logits of the rows ``tile.traced``; None without.
        logits: ``[N, V]`` fp32, after all edits.
        texts: what grammars have chosen.
        denoised: what the algorithm decided.
        soft: ``[N, soft_size]``, what the next step is conditioned on; None without
            ``soft_embeddings``.
        decided_scores: of tokens that this step decided for good; None if nobody asks, or if the
            next step decides them anew.
        num_emitted: ``[R]`` int64, how many tokens of each canvas are emitted.
    """

    tile: Tile
    ids: Tensor
    unedited: Tensor | None
    logits: Tensor
    texts: Written
    denoised: Denoised
    soft: Tensor | None
    decided_scores: LogprobsTensors | None
    num_emitted: Tensor
