"""The compiled parts of a step: functions of tensors over all rows of a batch.

    condition_rows  before the forward pass: the model's input of canvas rows
    denoise_rows    behind it: the algorithm's denoise step
    store_rows      the state of the next step, its canvas included, and what vLLM gets
    begin_rows      fresh canvases, behind a prompt or behind what was emitted

There are at least two rows: torch.compile treats a size of 1 as a special case.
"""

import torch

from dllm.engine.algorithm import Denoised, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.state import CanvasState
from dllm.ops.filters import RowFilters
from dllm.settings.denoising import NO_TOKEN


def condition_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    embeds: torch.Tensor,
    is_canvas_row: torch.Tensor,
    state: CanvasState,
    algorithm: DenoisingAlgorithm,
) -> None:
    """Write the canvas rows ``[N]`` of ``embeds`` ``[tokens, hidden]`` and ``is_canvas_row``.

    A block whose commit is deferred is no canvas.
    """
    is_canvas = ~state.commits[slots]
    if algorithm.soft_size is not None:
        own, soft = embeds[rows], state.soft_embeds[slots, places]
        conditioned = algorithm.self_condition(own, soft, state.steps_done[slots])
        embeds[rows] = torch.where(is_canvas[:, None], conditioned, own)
    is_canvas_row[rows] = is_canvas


def denoise_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    rows: CanvasRows,
    state: CanvasState,
    algorithm: DenoisingAlgorithm,
    filters: RowFilters | None,
    cap: float | None = None,
) -> Denoised:
    """A canvas ends where the model's output is not finite.

    A row is broken if a logit is NaN or infinite; not if it is -inf everywhere, because the request
    allows no token there. Arguments as of ``DenoisingAlgorithm.denoise`` and ``Canvases``.
    """
    step = algorithm.denoise(logits, rows, state.canvases(rows, ids, chosen), filters, cap)
    is_broken = (step.stats.log_z == torch.inf) & (step.stats.peak != -torch.inf) & rows.are_read
    num_broken = torch.zeros_like(rows.widths).index_add(0, rows.request_of, is_broken.long()).int()
    return step._replace(converged=step.converged | (num_broken > 0), num_broken=num_broken)


def store_rows(
    num_emitted: torch.Tensor,
    step: Denoised,
    rows: CanvasRows,
    state: CanvasState,
    algorithm: DenoisingAlgorithm,
    lengths: torch.Tensor,
    begins: bool,
    keeps_context: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Behind emitted tokens (``num_emitted`` ``[R]``) the next canvas is a fresh one, written here
    if ``begins``; else the caller does. With ``keeps_context`` all KV in front of a canvas is kept
    until it emits.

    Returns:
        int32: emitted tokens ``[R, C]``, how many ``[R]``, and ``num_rejected`` ``[R]``.
    """
    # Without a canvas: the spare slot.
    written = torch.where(rows.widths > 0, rows.slots, state.spare_slot)
    is_over = num_emitted > 0
    thoughts = state.thoughts(rows.slots, rows.starts)
    behind = thoughts.behind(step.argmax_canvas, num_emitted)
    canvas = step.canvas
    if not algorithm.decides_for_good:  # else the algorithm keeps what stands on a canvas
        pins = state.pins(rows.slots, rows.starts)
        canvas = torch.where(pins != NO_TOKEN, pins, canvas)
    # What takes no part in the step stays.
    takes_part = torch.arange(canvas.shape[1], device=canvas.device) < rows.widths[:, None]
    state.canvas[written] = torch.where(takes_part, canvas, state.canvas[written])
    for column, values in (
        (state.thought["begin"], behind.begin),
        (state.argmax_canvas, step.argmax_canvas),
        (state.steps_done, torch.where(is_over, 0, step.steps_done)),
        *(
            (state.step_state[name], _kept(step.step_state[name], ~is_over))
            for name in state.step_state
        ),
    ):
        column[written] = values.to(column.dtype)
    size: int | torch.Tensor = algorithm.settings.block_size
    if keeps_context:
        size = torch.where(is_over | (rows.widths == 0), size, 1)
    rejected = num_rejected(state, rows, lengths, size)
    if begins:
        begin_rows(*begins_behind(num_emitted, rows, state), state, algorithm)
    return step.argmax_canvas.int(), num_emitted.int(), rejected.int()


def begins_behind(
    num_emitted: torch.Tensor, rows: CanvasRows, state: CanvasState
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two arguments of ``begin_rows``, of canvases behind emitted tokens."""
    slots = torch.where(num_emitted > 0, rows.slots, state.spare_slot)
    return slots, rows.starts + num_emitted


def begin_rows(
    slots: torch.Tensor, starts: torch.Tensor, state: CanvasState, algorithm: DenoisingAlgorithm
) -> None:
    """The first contents of canvases; ``slots`` ``[R]`` int64: the spare one where none begins."""
    drawn = algorithm.fresh_canvas(state.seeds[slots], starts)
    thoughts = state.thoughts(slots, starts)
    state.canvas[slots] = state.with_given_tokens(slots, drawn, thoughts)


def _kept(column: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """``[R, ...]``, 0 where it is not kept (``[R]`` bool)."""
    return torch.where(is_kept.view(-1, *[1] * (column.dim() - 1)), column, 0)


def num_rejected(
    state: CanvasState, rows: CanvasRows, lengths: torch.Tensor, block_size: int | torch.Tensor
) -> torch.Tensor:
    """How many tokens of each request keep no KV: ``[R]``.

    What is kept ends with the last whole block in front of the canvas, or with that of a pending
    block: ``lengths`` ``[R]`` are a request's tokens, what it has emitted included.
    """
    ends = torch.where(state.commits[rows.slots], lengths, rows.starts)
    return rows.seq_lens - ends + ends % block_size
