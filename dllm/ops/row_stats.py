"""What a denoise step needs to know about each row of logits, defined once.

For a row of logits x at temperature T, with d = (x - max x) / T, z = sum exp(d), s = sum d exp(d):

    argmax   = the lowest id with the largest x
    sample   = argmax(d + gumbel)         one exact draw from softmax(x / T)   (Gumbel-max);
                                          the argmax of a row whose key is NO_KEY
    entropy  = log z - s / z              nats, of softmax(x / T)
    probs    = exp(d) / z                 what self-conditioning embeds

The temperature divides differences from the maximum, never the logits themselves: as T -> 0, x / T
overflows (or loses the maximum by rounding), while d is exactly 0 at the maximum and goes to -inf
elsewhere. The entropy is never negative: log z >= 0 >= s. Filters (`filters`) exclude tokens before
all this: x is -inf there.

`reference_row_stats` is this definition in plain torch operations; it also runs on a CPU if the
vocabulary is small. Otherwise `row_stats_cpu` runs, or on a GPU the kernels of `row_stats_gpu`;
`dispatch` chooses. Both read a row once from memory and write nothing of its size, unless the
probabilities are asked for, which take a second pass and one write. vLLM's
`diffusion_gemma_sampler.py` (0.32) computes the same numbers in one pass on a GPU; it differs in
the noise (one seed for a whole batch), in the filters (applied to a copy of all the logits) and in
a row without a finite logit, where its entropy is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.ops.noise import NO_KEY, gumbel


class RowStats(NamedTuple):
    """Statistics of `N` rows over a vocabulary of `V` tokens, which is cut into tiles.

    The probability of a token is exp((x - peak) / temperature - log_z) where x >= cutoff, else 0.
    """

    argmax: Tensor  # [N] int64, ties go to the lowest id
    sample: Tensor  # [N] int64, drawn from softmax(logits / temperature)
    entropy: Tensor  # [N] fp32, nats, >= 0; +inf marks a row that has no distribution
    peak: Tensor  # [N] fp32, the largest logit
    log_z: Tensor  # [N] fp32, log of z; +inf for a row that has no distribution
    cutoff: Tensor  # [N] fp32, the smallest logit that the filters keep; -inf without one
    tile_mass: Tensor  # [N, tiles] fp32, the probability of each tile of tokens; no tiles on a GPU
    probs: Tensor | None  # [N, V] in the dtype asked for


def reference_row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    cutoff: Tensor | None = None,
) -> RowStats:
    """The definition of `dispatch.row_stats`, with cutoffs [N] in the place of filters.

    Needs memory for several tensors of [N, V]. `tile_mass` has one tile, the whole row.
    """
    x = logits.to(torch.float32)  # [N, V]
    cutoff = torch.full_like(temperature, -torch.inf) if cutoff is None else cutoff
    x = torch.where(x < cutoff[:, None], -torch.inf, x)
    peak = x.amax(dim=-1)
    d = (x - peak[:, None]) / temperature[:, None]
    e = torch.exp(d)
    z = e.sum(dim=-1)
    s = torch.where(e > 0, d * e, 0.0).sum(dim=-1)  # where e = 0, d may be -inf: -inf * 0 is NaN
    has_distribution = z > 0  # false if d is NaN: all logits -inf (-inf - -inf), or one is NaN
    log_z = torch.where(has_distribution, torch.log(z), torch.inf)
    probs = torch.where(has_distribution[:, None], e / z[:, None], 0.0)
    argmax = x.argmax(dim=-1)
    drawn = (d + gumbel(keys, x.shape[-1])).argmax(dim=-1)
    return RowStats(
        argmax=argmax,
        sample=torch.where(keys[:, 0] == NO_KEY, argmax, drawn),
        entropy=torch.where(has_distribution, log_z - s / z, torch.inf),
        peak=peak,
        log_z=log_z,
        cutoff=cutoff,
        tile_mass=probs.sum(dim=-1, keepdim=True),
        probs=None if probs_dtype is None else probs.to(probs_dtype),
    )
