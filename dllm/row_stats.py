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
`row_stats_kernel`. Both read a row once from memory and write nothing of its size unless the
probabilities are asked for: those are a second pass over the row, and one write. vLLM's
`diffusion_gemma_sampler.py` (0.32) computes the same numbers in one pass on a GPU; it differs in
the noise (one seed for a whole batch), in the filters (applied to a copy of all the logits) and in
a row without a finite logit, where its entropy is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.noise import gumbel
from dllm.row_filters import RowFilters, cutoffs
from dllm.row_stats_cpu import TILE_TOKENS, row_stats_cpu, tile_width

KERNEL_MASS_TILE = 64

__all__ = ["RowFilters", "RowStats", "reference_row_stats", "row_stats"]


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


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None = None,
) -> RowStats:
    """Statistics of each row in fp32, finite for every temperature > 0.

    With `filters`, sample, entropy and probabilities are those of the filtered, renormalized
    distribution (`row_filters`); the argmax survives every filter.

    logits: [N, V] fp32 or bf16, soft-capped; every entry finite or -inf (an excluded token, which
    is never sampled, has probability 0 and contributes 0 to the entropy). temperature: [N] fp32,
    > 0. keys: [N, 2] int64 from `noise.row_keys`. probs_dtype: None leaves out the probabilities.

    A row that is -inf throughout, or holds a NaN, has no distribution. It gets entropy +inf and
    probabilities 0, so that its position is never accepted, its canvas never confident (a NaN
    entropy has the same effect in the Hugging Face sampler), and no NaN reaches another position
    through self-conditioning. Its argmax and sample are valid ids that mean nothing.

    No row depends on the rows beside it. On a CPU the passes are compiled where the caller is.
    """
    if not logits.is_cuda and logits.shape[-1] <= TILE_TOKENS:
        # A single tile, where nothing can be skipped: the caller's compiler fuses the definition.
        cutoff = None
        if filters is not None:
            cutoff = torch.ops.dllm.cutoffs(logits, temperature, *filters)
        return reference_row_stats(logits, temperature, keys, probs_dtype, cutoff)
    result = torch.ops.dllm.row_stats(
        logits, temperature, keys, probs_dtype, *(filters or _OFF), torch.compiler.is_compiling()
    )
    return RowStats._make([*result[:-1], None if probs_dtype is None else result[-1]])


def mass_tile(logits: Tensor) -> int:
    """How many tokens share a `tile_mass`: on a GPU few, because whole tiles are skipped there."""
    return KERNEL_MASS_TILE if logits.is_cuda else tile_width(logits.shape[-1])


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


_OFF = (None, None, None)


@torch.library.custom_op("dllm::row_stats", mutates_args=())
def _row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    is_compiled: bool,
) -> list[Tensor]:
    """One operation for `torch.compile`, which cannot look into the searches and the skipping."""
    filters = None
    if top_k is not None and top_p is not None and min_p is not None:
        filters = RowFilters(top_k, top_p, min_p)
    if logits.is_cuda:
        from dllm.row_stats_kernel import KernelTiles, row_stats_kernels  # needs Triton

        return row_stats_kernels(logits, temperature, keys, probs_dtype, filters, KernelTiles())
    return row_stats_cpu(logits, temperature, keys, probs_dtype, filters, is_compiled)


@torch.library.custom_op("dllm::cutoffs", mutates_args=())
def _cutoffs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The filters on a CPU, likewise."""
    filters = RowFilters(top_k, top_p, min_p)
    return cutoffs(logits.float(), temperature, filters, logits.shape[-1])


@_cutoffs.register_fake
def _cutoff_shape(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    return torch.empty_like(temperature)


@_row_stats.register_fake
def _shapes(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    is_compiled: bool,
) -> list[Tensor]:
    num_rows, vocab_size = logits.shape
    ids = [logits.new_empty(num_rows, dtype=torch.int64) for _ in range(2)]
    numbers = [temperature.new_empty(num_rows) for _ in range(4)]
    tiles = temperature.new_empty(num_rows, -(-vocab_size // mass_tile(logits)))
    probs = logits.new_empty(num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype)
    return [*ids, *numbers, tiles, probs]
