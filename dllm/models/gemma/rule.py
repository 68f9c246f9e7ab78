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
emitted, so it need not converge (`is_stop` of `StepInputs`). What the request gives is settled from
the start, and in no mean (`is_held`). With all False both are the reference's rule.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PerRow = Tensor | float


class DenoiseRules(NamedTuple):
    """The parameters of a step, each `[R]` or a plain number."""

    t_min: PerRow
    t_max: PerRow
    max_steps: PerRow  # a canvas converges after this many denoise steps at the latest
    entropy_bound: PerRow  # nats, see `accept_mask`
    confidence: PerRow  # nats: a canvas is confident if its mean entropy is below this
    stability_window: PerRow  # equal argmax canvases in a row; Hugging Face's threshold + 1


class DenoiseState(NamedTuple):
    """What is kept of R canvases from step to step."""

    canvas: Tensor  # [R, C] int64: the noisy input of the next step
    argmax_canvas: Tensor  # [R, C] int64: the most likely tokens, which would be emitted
    stable_count: Tensor  # [R, C] int: for how many steps the argmax token has been the same
    steps_done: Tensor  # [R] int: denoise steps that the canvas has taken


class StepInputs(NamedTuple):
    """What a step decides from. Values beyond a row's width are not used."""

    # argmax, sample and entropy are of the distribution at `temperature(state.steps_done, ...)`, as
    # `ops.row_stats` computes them.
    argmax: Tensor  # [R, C] int64: the most likely token
    sample: Tensor  # [R, C] int64: a sampled token
    entropy: Tensor  # [R, C] fp32, nats
    noise_tokens: Tensor  # [R, C] int64: a random token, used where the sample is not accepted
    is_stop: Tensor  # [R, C] bool: the argmax token ends the request
    is_held: Tensor  # [R, C] bool: the token is given, and argmax, sample and entropy say so


class DenoiseOutcome(NamedTuple):
    """The state after a step, and which canvases have converged."""

    canvas: Tensor
    argmax_canvas: Tensor
    stable_count: Tensor
    steps_done: Tensor
    accepted: Tensor  # [R, C] bool: the sampled token is kept
    converged: Tensor  # [R] bool: emit `argmax_canvas`


def denoise_step(
    state: DenoiseState, inputs: StepInputs, width: Tensor, rules: DenoiseRules
) -> DenoiseOutcome:
    """The whole step: the next state of every canvas, and which have converged.

    width: [R] int. Positions beyond it keep the values of `state`. Nothing is written in place. A
    converged canvas is returned like any other; the caller starts the next one.
    """
    valid = valid_positions(width, inputs.entropy.shape[-1])
    accept = accept_mask(inputs.entropy, width, rules.entropy_bound)
    stable_count = count_stable(inputs.argmax, state.argmax_canvas, state.stable_count)
    steps_done = state.steps_done + 1
    entropy, is_held = inputs.entropy, inputs.is_held
    stop_width = width_to_stop(inputs.is_stop, width)
    converged = (
        has_settled(stable_count, entropy, width, rules, is_held)
        | has_settled(stable_count, entropy, stop_width, rules, is_held)
        | (steps_done >= rules.max_steps)
    )
    active = width > 0
    next_canvas = renoise(inputs.sample, accept, inputs.noise_tokens)
    return DenoiseOutcome(
        canvas=torch.where(valid, next_canvas, state.canvas),
        argmax_canvas=torch.where(valid, inputs.argmax, state.argmax_canvas),
        stable_count=torch.where(valid, stable_count, state.stable_count),
        steps_done=torch.where(active, steps_done, state.steps_done),
        accepted=accept,
        converged=converged & active,
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


def renoise(sample: Tensor, accept: Tensor, noise_tokens: Tensor) -> Tensor:
    """The next canvas: sampled tokens where accepted, random tokens elsewhere. All are [R, C]."""
    return torch.where(accept, sample, noise_tokens)


def count_stable(argmax: Tensor, previous_argmax: Tensor, stable_count: Tensor) -> Tensor:
    """For how many steps, including this one, the argmax token has been the same: [R, C], >= 1.

    argmax, previous_argmax: [R, C] int64. stable_count: [R, C] int, the count of the step before; 0
    before the first step, and then the result is 1 whatever `previous_argmax` holds.

    Hugging Face keeps the last w - 1 argmax canvases instead, and compares them with this one. All
    of them equal this one if and only if every count of the canvas is at least w.
    """
    return torch.where(argmax == previous_argmax, stable_count, 0) + 1


def width_to_stop(is_stop: Tensor, width: Tensor) -> Tensor:
    """The number of positions up to and including the first stop token: [R] int.

    is_stop: [R, C] bool. width: [R] int; it is the result for a row without a stop token.
    """
    place = torch.arange(is_stop.shape[-1], device=width.device)
    length = torch.where(is_stop, place + 1, is_stop.shape[-1]).amin(dim=-1)
    return torch.minimum(length, width)


def mean_entropy(entropy: Tensor, counts: Tensor) -> Tensor:
    """The mean entropy of the positions in `counts` [R, C] bool: [R] fp32, nats; 0 if none are."""
    return torch.where(counts, entropy, 0.0).sum(dim=-1) / counts.sum(dim=-1).clamp(min=1)


def has_settled(
    stable_count: Tensor, entropy: Tensor, width: Tensor, rules: DenoiseRules, is_held: Tensor
) -> Tensor:
    """Whether the first `width` positions, without those that are held, are stable and confident.

    Returns [R] bool. stable_count: [R, C] int and entropy: [R, C] fp32, after this step; width: [R]
    int; is_held: [R, C] bool. Source: StableAndConfidentStoppingCriteria.
    """
    counts = valid_positions(width, entropy.shape[-1]) & ~is_held
    stable = ((stable_count >= _column(rules.stability_window)) | ~counts).all(dim=-1)
    return stable & (mean_entropy(entropy, counts) < rules.confidence)


def _column(value: PerRow) -> PerRow:
    """`[R]` as `[R, 1]`, for comparison with `[R, C]`; a plain number as it is."""
    return value[:, None] if isinstance(value, Tensor) else value


def _fp32(value: PerRow) -> PerRow:
    """A tensor in fp32. A plain number as it is: torch rounds it when it meets an fp32 tensor."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value
