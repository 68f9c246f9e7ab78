"""Rows and embeddings that the tests of the soft embedding share; no vLLM, no Triton."""

import math

import torch
from torch import Tensor

HIDDEN = 24
INF = math.inf


def table(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embeddings: [vocab, HIDDEN]."""
    return torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def rows_of_every_kind(vocab: int) -> Tensor:
    """Rows of logits, ``[13, vocab]``, of six kinds.

    Nearly equal logits, widely spread ones, a few tokens far above the rest, one certain token, all
    but five tokens at -inf, and all equal.
    """
    generator = torch.Generator().manual_seed(2)
    noise_rows = torch.randn(12, vocab, generator=generator)
    sure = noise_rows[:4] * 2 - 12
    sure.scatter_(1, torch.randint(vocab, (4, 6), generator=generator), 4.0)
    certain = noise_rows[4:6] - 200
    certain[:, 17] = 3.0
    excluded = noise_rows[6:8].clone()
    excluded[:, 5:] = -INF
    equal = torch.full((1, vocab), 2.5)
    return torch.cat([noise_rows[8:10] * 0.1, noise_rows[10:] * 5, sure, certain, excluded, equal])
