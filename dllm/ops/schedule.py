"""How many masks each denoise step reveals, where a block is decided in a number of steps.

A schedule is the fraction of a block that is still masked at time t, from 1 at t = 0 to 0 at t = 1.
Behind step s of S the masks that are left are rounded: size * fraction((s + 1) / S). A step reveals
the difference, and at least one mask, so that the last steps may have nothing to reveal.

    linear   1 - t               the same number in every step; the first ones reveal one more each
    cosine   1 - sin(pi t / 2)   many at first, few at the end: [6, 5, 4, 1] for 16 masks in 4 steps
    sqrt     sqrt(1 - t)         few at first, many at the end: [2, 3, 3, 8]

"cosine" is called so in AitherOS's article on block diffusion drafting (April 2026), which rounds
so, too, and shows [6, 5, 3, 2]. The formula that is printed there, cos(pi t / 2), is MaskGIT's and
gives [1, 4, 5, 6].
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Schedule = Literal["linear", "cosine", "sqrt"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
LINEAR, COSINE, SQRT = range(len(SCHEDULES))
REVERSE = len(SCHEDULES)  # of some families, with the next function
LAST_TIME = 1e-3  # at which the reverse process ends


def reverse_share(step: Tensor, num_steps: Tensor) -> Tensor:
    """With which probability the reverse process reveals a mask in this step: float64.

    From time t to s, which are even from 1 to LAST_TIME, it is 1 - s / t. Source:
    ``diffusion_generate`` of Dream. Arguments ``[R]`` integers.
    """
    width = (1 - LAST_TIME) / num_steps.double()
    return width / (1 - step * width)


def num_revealed(step: Tensor, num_steps: Tensor, size: int | Tensor, schedule: Tensor) -> Tensor:
    """Integers of the arguments' shape. `step` counts from 0, of `num_steps` of the whole block."""
    # As `get_num_transfer_tokens` of SDAR and LLaDA2.
    even = size // num_steps + (step < size % num_steps).to(step.dtype)
    left = torch.round(size * _masked((step + 1) / num_steps, schedule))
    curved = (torch.round(size * _masked(step / num_steps, schedule)) - left).to(step.dtype)
    return torch.where(schedule == LINEAR, even, curved).clamp(min=1)


def reveal_counts(schedule: str, size: int, num_steps: int) -> list[int]:
    """Their sum is ``size``; fewer than ``num_steps`` where fewer steps reveal all."""
    steps = torch.arange(num_steps)
    every = num_revealed(
        steps,
        torch.full_like(steps, num_steps),
        size,
        torch.full_like(steps, SCHEDULES.index(schedule)),
    )
    counts: list[int] = []
    for count in every.tolist():
        counts.append(min(count, size - sum(counts)))
    return [count for count in counts if count]


def _masked(time: Tensor, schedule: Tensor) -> Tensor:
    """The fraction that is masked: float64."""
    time = time.double().clamp(max=1.0)
    cosine = 1.0 - torch.sin(time * (math.pi / 2))
    return torch.where(schedule == COSINE, cosine, torch.sqrt(1.0 - time))
