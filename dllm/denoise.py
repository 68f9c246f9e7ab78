"""One denoise step after the forward pass: temperature, accept, renoise, stop.

Pure functions on tensors padded to `[R, C]`: R rows, C = the served canvas length. Row r uses its
first `width[r]` positions; the positions from there on do not exist: they are never accepted and
count in no mean and no comparison. A row of width 0 takes no step.

Defined by Hugging Face transformers 5.19, `models/diffusion_gemma/generation_diffusion_gemma.py`;
`tests/test_denoise.py` holds every function to the class that it names. Parameters are plain
numbers or one number per row (`[R]` tensors).
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
    stable_count: Tensor  # [R] int: consecutive identical argmax canvases, this one included
    steps_done: Tensor  # [R] int


class DenoiseOutcome(NamedTuple):
    """The state after a step, and which rows have converged by it."""

    canvas: Tensor
    argmax_canvas: Tensor
    stable_count: Tensor
    steps_done: Tensor
    converged: Tensor  # [R] bool: emit `argmax_canvas`


def denoise_step(
    state: DenoiseState,
    argmax: Tensor,
    sample: Tensor,
    entropy: Tensor,
    noise_tokens: Tensor,
    width: Tensor,
    rules: DenoiseRules,
) -> DenoiseOutcome:
    """The whole step: the next state of every row, and who has converged.

    argmax, sample: [R, C] int64 and entropy: [R, C] fp32, from `row_stats` at
    `temperature(state.steps_done, ...)`; noise_tokens: [R, C] int64; width: [R] int. Entries
    beyond the width may hold anything and keep their place in the state. Writes nothing in place.
    A converged row comes back like any other: starting its next canvas is the caller's business.
    """
    valid = valid_positions(width, entropy.shape[-1])
    accept = accept_mask(entropy, width, rules.entropy_bound)
    stable_count = count_stable(argmax, state.argmax_canvas, state.stable_count, width)
    steps_done = state.steps_done + 1
    converged = has_converged(stable_count, mean_entropy(entropy, width), steps_done, rules)
    active = width > 0
    return DenoiseOutcome(
        canvas=torch.where(valid, renoise(sample, accept, noise_tokens), state.canvas),
        argmax_canvas=torch.where(valid, argmax, state.argmax_canvas),
        stable_count=torch.where(active, stable_count, state.stable_count),
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


def count_stable(
    argmax: Tensor, previous_argmax: Tensor, stable_count: Tensor, width: Tensor
) -> Tensor:
    """How many consecutive argmax canvases, this one included, are identical: [R], >= 1.

    argmax, previous_argmax: [R, C] int64; stable_count: [R] int, 0 before the first step: then
    the count is 1 whatever `previous_argmax` holds. A count of at least w says the same as a
    history of w - 1 canvases that all equal this one, which is what Hugging Face keeps.
    """
    valid = valid_positions(width, argmax.shape[-1])
    same = ((argmax == previous_argmax) | ~valid).all(dim=-1)
    return torch.where(same, stable_count, 0) + 1


def mean_entropy(entropy: Tensor, width: Tensor) -> Tensor:
    """Mean over the positions that exist: [R] fp32, nats; 0 where width is 0."""
    valid = valid_positions(width, entropy.shape[-1])
    return torch.where(valid, entropy, 0.0).sum(dim=-1) / width.clamp(min=1)


def has_converged(
    stable_count: Tensor, mean: Tensor, steps_done: Tensor, rules: DenoiseRules
) -> Tensor:
    """Stable and confident, or out of steps: [R] bool. All arguments [R], after this step.

    Source: StableAndConfidentStoppingCriteria, and the loop over `cur_step` in `generate`.
    """
    stable = stable_count >= rules.stability_window
    confident = mean < rules.confidence
    return (stable & confident) | (steps_done >= rules.max_steps)


def _column(value: PerRow) -> PerRow:
    """[R] to [R, 1], for comparison with [R, C]; a plain number stays one."""
    return value[:, None] if isinstance(value, Tensor) else value


def _fp32(value: PerRow) -> PerRow:
    """fp32 rounding of a tensor; torch rounds a plain number itself."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value
