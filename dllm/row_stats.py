"""What a denoise step needs to know about each row of logits, defined once.

For a row of logits x at temperature T, with d = (x - max x) / T, z = sum exp(d), s = sum d exp(d):

    argmax   = the lowest id with the largest x
    sample   = argmax(d + gumbel)         one exact draw from softmax(x / T)   (Gumbel-max)
    entropy  = log z - s / z              nats, of softmax(x / T)
    probs    = exp(d) / z                 what self-conditioning embeds

The temperature divides differences from the maximum, never the logits themselves: as T -> 0, x / T
overflows (or rounds the maximum away from itself), while d is exactly 0 at the maximum and goes to
-inf elsewhere. The entropy is never negative: log z >= 0 >= s.

This is the definition, in torch operations that `torch.compile` fuses into passes over the row; a
kernel has to agree with it. vLLM's `diffusion_gemma_sampler.py` (0.32) computes the same numbers
in one pass; it differs in the noise (one seed for a whole batch) and in a row without a finite
logit, where its entropy is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.noise import gumbel


class RowStats(NamedTuple):
    """Statistics of `N` rows over a vocabulary of `V`."""

    argmax: Tensor  # [N] int64, ties go to the lowest id
    sample: Tensor  # [N] int64, drawn from softmax(logits / temperature)
    entropy: Tensor  # [N] fp32, nats, >= 0; +inf marks a row that has no distribution
    probs: Tensor | None  # [N, V] in the dtype asked for


def row_stats(
    logits: Tensor, temperature: Tensor, keys: Tensor, probs_dtype: torch.dtype | None
) -> RowStats:
    """Statistics of each row in fp32, finite for every temperature > 0.

    logits: [N, V] fp32 or bf16, soft-capped; every entry finite or -inf (an excluded token, which
    is never sampled, has probability 0 and contributes 0 to the entropy). temperature: [N] fp32,
    > 0. keys: [N, 2] int64 from `noise.row_keys`. probs_dtype: None leaves out the probabilities.

    A row that is -inf throughout, or holds a NaN, has no distribution. It gets entropy +inf and
    probabilities 0, so that its position is never accepted, its canvas never confident (a NaN
    entropy has the same effect in the Hugging Face sampler), and no NaN reaches another position
    through self-conditioning. Its argmax and sample are valid ids that mean nothing.
    """
    x = logits.to(torch.float32)
    d = (x - x.amax(dim=-1, keepdim=True)) / temperature[:, None]
    e = torch.exp(d)
    z = e.sum(dim=-1)
    s = torch.where(e > 0, d * e, 0.0).sum(dim=-1)  # -inf * 0 is NaN
    has_distribution = z > 0  # not if d is NaN: -inf - -inf, or a NaN logit
    entropy = torch.where(has_distribution, torch.log(z) - s / z, torch.inf)
    probs = None
    if probs_dtype is not None:
        probs = torch.where(has_distribution[:, None], e / z[:, None], 0.0).to(probs_dtype)
    sample = (d + gumbel(keys, x.shape[-1])).argmax(dim=-1)
    return RowStats(x.argmax(dim=-1), sample, entropy, probs)
