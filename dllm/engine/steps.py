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
    """Canvases whose logits exist at once, and what the host decides about their engine step."""

    logit_rows: slice  # theirs among all canvas rows of the batch
    is_raw: bool  # nobody needs whole rows: logits are soft-capped where they are read
    batch: InputBatch  # their requests alone
    rows: CanvasRows  # at least two, of which the last may be empty
    traced: Tensor | None  # [n], rows of logits whose tokens are traced
    is_read_only: Tensor | None  # [N] bool; None if nobody asks for logprobs
    is_pinned: Tensor | None  # [N, 1] bool, rows whose input token is a pin; None if nobody pins
    filters: RowFilters | None
    edits: PreparedEdits | None  # of ``LogitEdits.prepare``
    grammars: Any  # of ``CanvasGrammars.prepare``


class StepRecord(NamedTuple):
    """What a step did to a tile: the next state, logprobs, traces and frames are read from it."""

    tile: Tile
    ids: Tensor  # [N] int64, the canvas tokens that entered the model
    unedited: Tensor | None  # [n, V] fp32, the model's logits of the rows ``tile.traced``
    logits: Tensor  # [N, V] fp32, after all edits
    texts: Written  # what grammars have chosen
    denoised: Denoised
    soft: Tensor | None  # [N, soft_size], what the next step is conditioned on
    decided_scores: LogprobsTensors | None  # of ``BlockLogprobs.of_decided``
    num_emitted: Tensor  # [R] int64, how many tokens of each canvas are emitted
