"""How many draft tokens each denoise pass reveals, when a block is drafted in several passes.

A schedule is the fraction of the block that is still masked at time t, from 1 at t = 0 to 0 at
t = 1. Pass s of S reveals what the fraction loses between (s - 1) / S and s / S, rounded down; the
last pass reveals the rest.

    cosine   1 - sin(pi t / 2)   many at first, few at the end: [6, 5, 3, 2] for 16 tokens in 4
    linear   1 - t               the same number in every pass
    sqrt     sqrt(1 - t)         few at first, many at the end

"Cosine" follows the description in AitherOS's article on block diffusion drafting (April 2026),
which reveals [6, 5, 3, 2]. The formula printed there, cos(pi t / 2), gives the reverse order.
"""

import itertools
import math
from collections.abc import Callable

import torch

MASKED_FRACTION: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: 1.0 - math.sin(math.pi * t / 2),
    "linear": lambda t: 1.0 - t,
    "sqrt": lambda t: math.sqrt(1.0 - t),
}


def reveal_counts(schedule: str, num_drafts: int, num_steps: int) -> list[int]:
    """Tokens revealed by each pass, each at least 1; their sum is ``num_drafts``.

    Passes that would reveal nothing are left out: the list may be shorter than ``num_steps``.
    """
    masked = MASKED_FRACTION[schedule]
    edges = [masked(step / num_steps) for step in range(num_steps)]
    # The tiny addend keeps a difference that is a whole number from being rounded down.
    counts = [
        math.floor(num_drafts * (before - after) + 1e-9)
        for before, after in itertools.pairwise(edges)
    ]
    counts.append(num_drafts - sum(counts))
    return [count for count in counts if count > 0]


def reveal_surest(
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    is_masked: torch.Tensor,
    logits: torch.Tensor,
    count: int,
) -> None:
    """Decide, in each row, the ``count`` masked positions of which the model is surest.

    Surest are the positions whose most likely token has the highest probability.

    Args:
        drafts: ``[rows, N]`` int64; the chosen tokens are written to it.
        confidence: ``[rows, N]`` fp32; their probabilities are written to it.
        is_masked: ``[rows, N]`` bool, at least ``count`` in each row; cleared where decided.
        logits: ``[rows, N, vocab]``.
    """
    likeliest, tokens = logits.float().softmax(-1).max(-1)  # [rows, N] each
    chosen = likeliest.masked_fill(~is_masked, -1.0).topk(count, dim=-1).indices  # [rows, count]
    drafts.scatter_(1, chosen, tokens.gather(1, chosen))
    confidence.scatter_(1, chosen, likeliest.gather(1, chosen))
    is_masked.scatter_(1, chosen, False)
