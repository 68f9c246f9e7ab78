"""Which twin runs: the definition, the CPU version or the Triton kernels.

The operations that `torch.compile` cannot look into are registered here, so that it takes each for
one node of its graph.
"""

from typing import Literal

import torch
from torch import Tensor

from dllm.ops.filters import RowFilters, cutoffs
from dllm.ops.row_stats import KERNEL_MASS_TILE, RowStats, reference_row_stats
from dllm.ops.row_stats_cpu import TILE_TOKENS, row_stats_cpu, tile_width
from dllm.ops.soft_embedding import Shard, sparse_product_cpu

# Below this many tokens the exact product costs less than choosing what to leave out of it.
SMALLEST_VOCABULARY = 2**13


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


def uses_sparse_product(
    option: Literal["auto", "sparse", "exact"], vocab_size: int, device: torch.device
) -> bool:
    """Whether a server with this option leaves tokens out: not if the vocabulary is small."""
    is_sparse = option == "sparse" or (option == "auto" and device.type == "cpu")
    return is_sparse and vocab_size >= SMALLEST_VOCABULARY


def sparse_product(
    logits: Tensor, temperature: Tensor, stats: RowStats, shard: Shard, budget: float
) -> Tensor:
    """The soft embedding of each row, less at most `budget` of its probability.

    Waits for the device on a CPU alone, where it reads from the data how many tokens are left.

    Args:
        logits: [N, V], those that `stats` are of, unchanged since.
        temperature: [N], likewise.
        budget: in [0, 1).

    Returns:
        [N, hidden] in the shard's dtype: what the shard's tokens contribute.
    """
    if logits.is_cuda:
        from dllm.ops.soft_embedding_gpu import ProductTiles, sparse_product_kernels  # needs Triton

        tile = mass_tile(logits)
        return sparse_product_kernels(
            logits, temperature, stats, shard, budget, tile, ProductTiles()
        )
    return sparse_product_cpu(logits, temperature, stats, shard, budget)


def mass_tile(logits: Tensor) -> int:
    """How many tokens share a `tile_mass`: on a GPU few, because whole tiles are skipped there."""
    return KERNEL_MASS_TILE if logits.is_cuda else tile_width(logits.shape[-1])


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
        from dllm.ops.row_stats_gpu import KernelTiles, row_stats_kernels  # needs Triton

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
