"""Logits of rows that are sure of nothing, or of a token."""

import torch
from torch import Tensor


def make_logits(rows: int, vocab: int, profile: str) -> Tensor:
    """``[rows, vocab]`` fp32.

    ``open``: normal with a deviation of 3, as at a first step: thousands of tokens of a row have a
    probability that matters. ``settled``: a normal bulk around -8 with a deviation of 2.5, 20
    tokens around 8 and one at 22, so that few tokens matter.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, vocab).normal_(generator=generator)
    if profile == "open":
        return logits.mul_(3)
    ids = torch.randint(vocab, (rows, 21), generator=generator)
    likely = 8 + 2 * torch.randn(rows, 21, generator=generator)
    return logits.mul_(2.5).sub_(8).scatter_(1, ids, likely).scatter_(1, ids[:, :1], 22)
