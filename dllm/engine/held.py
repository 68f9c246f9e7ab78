"""Held pins: tokens that a request fixes and that are emitted (``diffusion_pin_mode: hold``)."""

import torch
from torch import Tensor

from dllm.engine.canvas_rows import CanvasRows
from dllm.ops.row_stats import RowStats


def with_held_tokens(stats: RowStats, held: Tensor, rows: CanvasRows) -> RowStats:
    """The statistics in which held tokens are chosen, and certain.

    A family's ``denoise`` calls this before it decides anything. Logprobs do not come from here:
    at a held position they say what the model itself thinks of the token.

    Args:
        stats: of N rows of logits.
        held: ``[R, C]`` int64, the token that has to be emitted; -1: any.
    """
    tokens = held[rows.row_of, rows.place]  # [N]
    is_held = tokens >= 0
    return stats._replace(
        argmax=torch.where(is_held, tokens, stats.argmax),
        sample=torch.where(is_held, tokens, stats.sample),
        entropy=torch.where(is_held, 0.0, stats.entropy),
    )
