"""One denoise step after the forward pass: temperature, accept, renoise, stop.

Pure functions on tensors padded to `[R, C]`: R rows, C = the served canvas length. Row r uses its
first `width[r]` positions; the positions from there on do not exist: they are never accepted and
count in no mean and no comparison. A row of width 0 takes no step.

Defined by Hugging Face transformers 5.19, `models/diffusion_gemma/generation_diffusion_gemma.py`;
`tests/models/test_denoise.py` holds every function to the class that it names. Parameters are plain
numbers or one number per row (`[R]` tensors).

One rule is ours: what stands behind the first token that ends the request is never emitted, so it
need not converge (`is_stop` of `StepInputs`; all False is exactly the reference's rule).
"""

from typing import NamedTuple

import torch
from torch import Tensor

PerRow = Tensor | float


class DenoiseRules(NamedTuple):
    """The parameters of a step, each `[R]` or a plain number."""

    t_min: PerRow
    t_max: PerRow
    max_steps: PerRow  # at most this many denoise steps a block
    entropy_bound: PerRow  # nats
    confidence: PerRow  # nats: a canvas is confident below this mean entropy
    stability_window: PerRow  # identical argmax canvases needed, Hugging Face's threshold + 1


class DenoiseState(NamedTuple):
    """What a canvas carries from step to step, `R` rows of `C` positions."""

    canvas: Tensor  # [R, C] int64: the noisy input of the next step
    argmax_canvas: Tensor  # [R, C] int64: what would be emitted
    stable_count: Tensor  # [R, C] int: consecutive equal argmax tokens, the last one included
    steps_done: Tensor  # [R] int


class StepInputs(NamedTuple):
    """What a step decides from. Entries beyond a row's width may hold anything."""

    argmax: Tensor  # [R, C] int64, from `row_stats` at `temperature(state.steps_done, ...)`
    sample: Tensor  # [R, C] int64, the same
    entropy: Tensor  # [R, C] fp32, the same
    noise_tokens: Tensor  # [R, C] int64: a random token for every position that is not accepted
    is_stop: Tensor  # [R, C] bool: an argmax token behind which nothing would be emitted


class DenoiseOutcome(NamedTuple):
    """The state after a step, and which rows have converged by it."""

    canvas: Tensor
    argmax_canvas: Tensor
    stable_count: Tensor
    steps_done: Tensor
    converged: Tensor  # [R] bool: emit `argmax_canvas`


def denoise_step(
    state: DenoiseState, inputs: StepInputs, width: Tensor, rules: DenoiseRules
) -> DenoiseOutcome:
    """The whole step: the next state of every row, and who has converged.

    width: [R] int. Positions beyond it keep what they hold in the state. Writes nothing in place.
    A converged row comes back like any other: starting its next canvas is the caller's business.
    """
    valid = valid_positions(width, inputs.entropy.shape[-1])
    accept = accept_mask(inputs.entropy, width, rules.entropy_bound)
    stable_count = count_stable(inputs.argmax, state.argmax_canvas, state.stable_count)
    steps_done = state.steps_done + 1
    converged = (
        has_settled(stable_count, inputs.entropy, width, rules)
        | has_settled(stable_count, inputs.entropy, width_to_stop(inputs.is_stop, width), rules)
        | (steps_done >= rules.max_steps)
    )
    active = width > 0
    next_canvas = renoise(inputs.sample, accept, inputs.noise_tokens)
    return DenoiseOutcome(
        canvas=torch.where(valid, next_canvas, state.canvas),
        argmax_canvas=torch.where(valid, inputs.argmax, state.argmax_canvas),
        stable_count=torch.where(valid, stable_count, state.stable_count),
        steps_done=torch.where(active, steps_done, state.steps_done),
        converged=converged & active,
    )


def temperature(steps_done: Tensor, max_steps: PerRow, t_min: PerRow, t_max: PerRow) -> Tensor:
    """T = t_min + (t_max - t_min) * steps_left / max_steps: [R] fp32.

    steps_done: [R] int, the steps taken before this one; steps_left counts this one, so that the
    first step runs at t_max and the last at t_min + (t_max - t_min) / max_steps.
    Source: LinearTemperatureScheduleLogitsProcessor, whose `cur_step` is steps_left. It subtracts
    in float64 and does the rest in fp32: plain numbers and float64 tensors give its bits, fp32
    tensors of t_min and t_max may be one unit in the last place off.
    """
    fraction = ((max_steps - steps_done) / max_steps).to(torch.float32)
    return _fp32(t_max - t_min) * fraction + _fp32(t_min)


def valid_positions(width: Tensor, canvas_length: int) -> Tensor:
    """Which positions exist: [R, canvas_length] bool. width: [R] int."""
    return torch.arange(canvas_length, device=width.device) < width[:, None]


def accept_mask(entropy: Tensor, width: Tensor, entropy_bound: PerRow) -> Tensor:
    """The positions whose sampled token is kept: [R, C] bool.

    Positions are taken from the lowest entropy up while sum(h) - max(h) <= bound, an upper bound
    in nats on the mutual information of the tokens kept (arXiv 2505.24857); the lowest is always
    kept. Positions of equal entropy are taken from left to right. entropy: [R, C] fp32, where a
    NaN or +inf is never accepted; width: [R] int.
    Source: EntropyBoundSampler.accept_canvas, operation for operation.
    """
    valid = valid_positions(width, entropy.shape[-1])
    ordered, position = torch.sort(torch.where(valid, entropy, torch.inf), dim=-1, stable=True)
    bound = _column(entropy_bound)
    keep = torch.cumsum(ordered, dim=-1) - ordered <= bound  # never at +inf: inf - inf is NaN
    return torch.zeros_like(keep).scatter(-1, position, keep)


def renoise(sample: Tensor, accept: Tensor, noise_tokens: Tensor) -> Tensor:
    """The next canvas: sampled tokens where accepted, fresh random tokens elsewhere. All [R, C]."""
    return torch.where(accept, sample, noise_tokens)


def count_stable(argmax: Tensor, previous_argmax: Tensor, stable_count: Tensor) -> Tensor:
    """How many consecutive argmax tokens, this one included, are the same: [R, C], >= 1.

    argmax, previous_argmax: [R, C] int64; stable_count: [R, C] int, 0 before the first step: then
    the count is 1 whatever `previous_argmax` holds. That every count of a canvas is at least w says
    the same as a history of w - 1 canvases that all equal this one, which is what Hugging Face
    keeps.
    """
    return torch.where(argmax == previous_argmax, stable_count, 0) + 1


def width_to_stop(is_stop: Tensor, width: Tensor) -> Tensor:
    """How many positions are emitted at most: those up to the first stop, itself included: [R] int.

    is_stop: [R, C] bool; width: [R] int, which it is for a row without a stop.
    """
    place = torch.arange(is_stop.shape[-1], device=width.device)
    length = torch.where(is_stop, place + 1, is_stop.shape[-1]).amin(dim=-1)
    return torch.minimum(length, width)


def mean_entropy(entropy: Tensor, width: Tensor) -> Tensor:
    """Mean over the first `width` positions: [R] fp32, nats; 0 where width is 0."""
    valid = valid_positions(width, entropy.shape[-1])
    return torch.where(valid, entropy, 0.0).sum(dim=-1) / width.clamp(min=1)


def has_settled(
    stable_count: Tensor, entropy: Tensor, width: Tensor, rules: DenoiseRules
) -> Tensor:
    """Whether the first `width` positions are stable and confident: [R] bool.

    stable_count: [R, C] int and entropy: [R, C] fp32, after this step; width: [R] int.
    Source: StableAndConfidentStoppingCriteria.
    """
    valid = valid_positions(width, entropy.shape[-1])
    stable = ((stable_count >= _column(rules.stability_window)) | ~valid).all(dim=-1)
    return stable & (mean_entropy(entropy, width) < rules.confidence)


def _column(value: PerRow) -> PerRow:
    """[R] to [R, 1], for comparison with [R, C]; a plain number stays one."""
    return value[:, None] if isinstance(value, Tensor) else value


def _fp32(value: PerRow) -> PerRow:
    """fp32 rounding of a tensor; torch rounds a plain number itself."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value
