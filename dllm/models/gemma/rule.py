"""The decisions of a denoise step: temperature, which tokens are kept, noise, whether to stop.

These are functions of tensors and nothing else. Tensors are padded to `[R, C]`: R canvases, C the
served canvas length. Canvas r uses its first `width[r]` positions. The positions behind them are
padding: they are never accepted, and count in no mean and no comparison. A row of width 0 has no
canvas and takes no step.

The reference is Hugging Face transformers 5.19,
`models/diffusion_gemma/generation_diffusion_gemma.py`. `tests/models/test_rule.py` compares
every function with the class that its docstring names. Parameters are plain numbers, or tensors
`[R]` with one number for each canvas.

Two rules are not in the reference. What follows the first token that ends the request is never
emitted, so it need not converge (`is_stop` of `Canvases`). What the request gives is settled from
the start, and in no mean (`held`). Where there is neither, the rule is the reference's.
"""

import torch
from torch import Tensor

from dllm.engine.algorithm import Canvases, Denoised
from dllm.engine.canvas_rows import CanvasRows
from dllm.ops.noise import StepNoise
from dllm.ops.row_stats import RowStats

PerRow = Tensor | float


def denoise_step(
    canvases: Canvases,
    rows: CanvasRows,
    stats: RowStats,
    drawn: StepNoise,
    temperature: Tensor,
    stability_window: int,
) -> Denoised:
    """The whole step: the next state of every canvas, and which have converged.

    Nothing is written in place. Positions beyond a row's width keep the values of ``canvases``. A
    converged canvas is returned like any other; the caller starts the next one. ``stats`` are of
    each row of logits at ``temperature`` ``[N]``; where the sample is not accepted stand tokens of
    ``drawn``. ``stability_window``: equal argmax canvases in a row; Hugging Face's threshold + 1.
    """
    width, parameters = rows.widths, canvases.parameters
    argmax, entropy = stats.argmax[rows.padded], stats.entropy[rows.padded]  # [R, C]
    valid = valid_positions(width, entropy.shape[-1])
    accept = accept_mask(entropy, width, parameters["entropy_bound"])
    before = canvases.step_state["stable_count"]
    stable_count = count_stable(argmax, canvases.argmax_canvas, before)
    steps_done = canvases.steps_done + 1
    stop_width = width_to_stop(canvases.is_stop[rows.slots[:, None], argmax], width)
    converged = steps_done >= parameters["max_steps"]
    for looked_at in (width, stop_width):
        converged = converged | has_settled(
            stable_count,
            entropy,
            looked_at,
            is_held=canvases.held >= 0,
            confidence=parameters["confidence"],
            stability_window=stability_window,
        )
    active = width > 0
    return Denoised(
        canvas=torch.where(accept, stats.sample[rows.padded], drawn.renoise_tokens),
        argmax_canvas=torch.where(valid, argmax, canvases.argmax_canvas),
        accepted=accept,
        converged=converged & active,
        steps_done=torch.where(active, steps_done, canvases.steps_done),
        step_state={"stable_count": torch.where(valid, stable_count, before)},
        temperature=temperature,
        stats=stats,
    )


def temperature(steps_done: Tensor, max_steps: PerRow, t_min: PerRow, t_max: PerRow) -> Tensor:
    """T = t_min + (t_max - t_min) * steps_left / max_steps: [R] fp32.

    steps_done: [R] int, the steps before this one. steps_left = max_steps - steps_done includes
    this step: the first step has t_max, and the last t_min + (t_max - t_min) / max_steps.

    Source: LinearTemperatureScheduleLogitsProcessor, whose `cur_step` is steps_left. It subtracts
    in float64 and does the rest in fp32. With t_min and t_max as plain numbers or float64 tensors
    the result is equal to its result, bit by bit. With fp32 tensors the last bit may differ.
    """
    fraction = ((max_steps - steps_done) / max_steps).to(torch.float32)
    return _fp32(t_max - t_min) * fraction + _fp32(t_min)


def valid_positions(width: Tensor, canvas_length: int) -> Tensor:
    """Which positions are not padding: [R, canvas_length] bool. width: [R] int."""
    return torch.arange(canvas_length, device=width.device) < width[:, None]


def accept_mask(entropy: Tensor, width: Tensor, entropy_bound: PerRow) -> Tensor:
    """The positions whose sampled token is kept: [R, C] bool.

    Positions are accepted in order of their entropy h, lowest first, while sum(h) - max(h) over the
    accepted ones is at most `entropy_bound`. That difference is an upper bound, in nats, on the
    mutual information of the accepted tokens (arXiv 2505.24857). The position with the lowest
    entropy is always accepted. Positions of equal entropy are taken from left to right.

    entropy: [R, C] fp32; a position with NaN or +inf is never accepted. width: [R] int.
    Source: EntropyBoundSampler.accept_canvas, operation for operation.
    """
    valid = valid_positions(width, entropy.shape[-1])
    ordered, position = torch.sort(torch.where(valid, entropy, torch.inf), dim=-1, stable=True)
    bound = _column(entropy_bound)
    # [R, C], in order of entropy. The maximum of the first k values is the k-th. False where the
    # entropy is +inf, because inf - inf is NaN.
    keep = torch.cumsum(ordered, dim=-1) - ordered <= bound
    return torch.zeros_like(keep).scatter(-1, position, keep)


def count_stable(argmax: Tensor, previous_argmax: Tensor, stable_count: Tensor) -> Tensor:
    """For how many steps, including this one, the argmax token has been the same: [R, C], >= 1.

    argmax, previous_argmax: [R, C] int64. stable_count: [R, C] int, the count of the step before; 0
    before the first step, and then the result is 1 whatever `previous_argmax` holds.

    Hugging Face keeps the last w - 1 argmax canvases instead, and compares them with this one. All
    of them equal this one if and only if every count of the canvas is at least w.
    """
    return torch.where(argmax == previous_argmax, stable_count, 0) + 1


def width_to_stop(is_stop: Tensor, width: Tensor) -> Tensor:
    """Positions up to and including the first stop token ([R, C] bool), else ``width``: [R] int."""
    place = torch.arange(is_stop.shape[-1], device=width.device)
    length = torch.where(is_stop, place + 1, is_stop.shape[-1]).amin(dim=-1)
    return torch.minimum(length, width)


def has_settled(
    stable_count: Tensor,
    entropy: Tensor,
    width: Tensor,
    is_held: Tensor,
    confidence: PerRow,
    stability_window: PerRow,
) -> Tensor:
    """Whether the first `width` positions, without those that are held, are stable and confident.

    Returns [R] bool. stable_count: [R, C] int and entropy: [R, C] fp32, after this step; width: [R]
    int; is_held: [R, C] bool. confidence: nats, the mean entropy has to be below it.
    stability_window: equal argmax canvases in a row. Source: StableAndConfidentStoppingCriteria.
    """
    counts = valid_positions(width, entropy.shape[-1]) & ~is_held
    stable = ((stable_count >= _column(stability_window)) | ~counts).all(dim=-1)
    # The mean entropy; 0 if no position counts.
    mean = torch.where(counts, entropy, 0.0).sum(dim=-1) / counts.sum(dim=-1).clamp(min=1)
    return stable & (mean < confidence)


def _column(value: PerRow) -> PerRow:
    """`[R]` as `[R, 1]`, for comparison with `[R, C]`."""
    return value[:, None] if isinstance(value, Tensor) else value


def _fp32(value: PerRow) -> PerRow:
    """A plain number as it is: torch rounds it when it meets an fp32 tensor."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value
