"""What a denoise step needs to know about each row of logits, defined once.

For a row of logits x at temperature T, with d = (x - max x) / T, z = sum exp(d), s = sum d exp(d):

    argmax   = the lowest id with the largest x
    sample   = argmax(d + gumbel)         one exact draw from softmax(x / T)   (Gumbel-max)
    entropy  = log z - s / z              nats, of softmax(x / T)
    probs    = exp(d) / z                 what self-conditioning embeds

The temperature divides differences from the maximum, never the logits themselves: as T -> 0, x / T
overflows (or rounds the maximum away from itself), while d is exactly 0 at the maximum and goes to
-inf elsewhere. The entropy is never negative: log z >= 0 >= s. Filters (`row_filters`) exclude
tokens first: x is -inf there.

`reference_row_stats` is this definition in plain torch operations, and what runs on a CPU for a
small vocabulary. Otherwise that is `row_stats_cpu`, and on a GPU the Triton kernel of
`row_stats_gpu`; `dispatch` chooses. Both read a row once from memory and write nothing of its size
unless the probabilities are asked for: those are a second pass over the row, and one write. vLLM's
`diffusion_gemma_sampler.py` (0.32) computes the same numbers in one pass on a GPU; it differs in
the noise (one seed for a whole batch), in the filters (applied to a copy of all the logits) and in
a row without a finite logit, where its entropy is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.ops.noise import gumbel

KERNEL_MASS_TILE = 64  # tokens of a `tile_mass` on a GPU, where whole tiles are skipped


class RowStats(NamedTuple):
    """Statistics of `N` rows over a vocabulary of `V`, cut into tiles of tokens.

    The distribution is p = exp((x - peak) / temperature - log_z) where x >= cutoff, 0 elsewhere.
    """

    argmax: Tensor  # [N] int64, ties go to the lowest id
    sample: Tensor  # [N] int64, drawn from softmax(logits / temperature)
    entropy: Tensor  # [N] fp32, nats, >= 0; +inf marks a row that has no distribution
    peak: Tensor  # [N] fp32, the largest logit
    log_z: Tensor  # [N] fp32, log of z; +inf for a row that has no distribution
    cutoff: Tensor  # [N] fp32, the smallest logit that the filters keep; -inf without one
    tile_mass: Tensor  # [N, tiles] fp32, the probability of each tile of tokens
    probs: Tensor | None  # [N, V] in the dtype asked for


def reference_row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    cutoff: Tensor | None = None,
) -> RowStats:
    """The definition of `row_stats`, with cutoffs in the place of filters.

    It holds several tensors of `[N, V]`; its one tile is the row.
    """
    x = logits.to(torch.float32)
    cutoff = torch.full_like(temperature, -torch.inf) if cutoff is None else cutoff
    x = torch.where(x < cutoff[:, None], -torch.inf, x)
    peak = x.amax(dim=-1)
    d = (x - peak[:, None]) / temperature[:, None]
    e = torch.exp(d)
    z = e.sum(dim=-1)
    s = torch.where(e > 0, d * e, 0.0).sum(dim=-1)  # -inf * 0 is NaN
    has_distribution = z > 0  # not if d is NaN: -inf - -inf, or a NaN logit
    log_z = torch.where(has_distribution, torch.log(z), torch.inf)
    probs = torch.where(has_distribution[:, None], e / z[:, None], 0.0)
    return RowStats(
        argmax=x.argmax(dim=-1),
        sample=(d + gumbel(keys, x.shape[-1])).argmax(dim=-1),
        entropy=torch.where(has_distribution, log_z - s / z, torch.inf),
        peak=peak,
        log_z=log_z,
        cutoff=cutoff,
        tile_mass=probs.sum(dim=-1, keepdim=True),
        probs=None if probs_dtype is None else probs.to(probs_dtype),
    )
