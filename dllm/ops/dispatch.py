"""Chooses which version of an operation runs: the definition, the CPU one or the Triton kernels.

`torch.compile` cannot trace loops and searches that depend on the data. Operations with such loops
are registered here as custom operators, each of which is one node of the compiled graph.
"""

from typing import Literal

import torch
from torch import Tensor

from dllm.ops.filters import RowFilters, cutoffs
from dllm.ops.row_stats import (
    SMALL_VOCABULARY,
    RowStats,
    reference_row_stats,
    softcap,
    tile_width,
)
from dllm.ops.row_stats_cpu import row_stats_cpu
from dllm.ops.soft_embedding import Shard, sparse_product
from dllm.ops.tile_product import tile_product

# Kernels that compute something else than their definition on this GPU (``patches.self_test``).
WRONG_KERNELS: set[str] = set()
ROW_STATISTICS, GRAMMAR_PATHS = "row statistics", "grammar paths"
CONTEXT_KV = "context of a drafter"
SOFT_EMBEDDINGS = "soft embeddings"
# Below this vocabulary size the exact product is faster than selecting tokens to leave out.
SMALLEST_VOCABULARY = 2**13


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None = None,
    are_read: Tensor | None = None,
    cap: float | None = None,
) -> RowStats:
    """Statistics of each row in fp32, finite for every temperature > 0; defined in `row_stats`.

    No row depends on the other rows. With `filters`, sample, entropy and probabilities are those of
    the filtered, renormalized distribution (`filters`); no filter removes the argmax.

    A row that is -inf throughout, or holds a NaN, has no distribution. It gets entropy +inf and
    probabilities 0: its position is never accepted, its canvas never confident, and no NaN reaches
    other positions through self-conditioning. Its argmax and sample are ids without meaning.

    Args:
        logits: [N, V] fp32 or bf16, soft-capped; every entry finite or -inf. -inf excludes a token:
            it is never sampled, has probability 0 and adds 0 to the entropy.
        cap: of logits that are not soft-capped yet, nor edited: all are finite. They are capped
            where they are read, and nothing is written.
        temperature: [N] fp32, > 0.
        keys: [N, 2] int64 from `noise.row_keys`; `noise.NO_KEY` where the sample is the argmax.
        probs_dtype: of the probabilities; None leaves them out.
        are_read: [N] bool, rows whose logits somebody reads; None: all. On a GPU the others count
            as rows without a distribution. On a CPU it is not looked at.
    """
    if _runs_definition(logits.device, logits.shape[-1]):
        cutoff = None
        if filters is not None:
            is_any = filters.are_on(logits.shape[-1]).any()
            cutoff = torch.ops.dllm.cutoffs(softcap(logits, cap), temperature, *filters, is_any)
        return reference_row_stats(logits, temperature, keys, probs_dtype, cutoff, cap)
    result = torch.ops.dllm.row_stats(
        logits,
        temperature,
        keys,
        probs_dtype,
        *(filters or _OFF),
        are_read,
        cap,
        torch.compiler.is_compiling(),
    )
    # A custom operator cannot return None: without `probs_dtype` its last tensor is empty.
    return RowStats._make([*result[:-1], None if probs_dtype is None else result[-1]])


def _runs_definition(device: torch.device, vocab_size: int) -> bool:
    """On a CPU if the vocabulary is small: then a compiled caller fuses it with its own code."""
    if device.type == "cpu":
        return vocab_size <= SMALL_VOCABULARY
    return ROW_STATISTICS in WRONG_KERNELS


def uses_sparse_product(
    option: Literal["auto", "sparse", "exact"], vocab_size: int, is_batch_invariant: bool
) -> bool:
    """``auto`` does not where a row may not depend on others (VLLM_BATCH_INVARIANT): in which order
    a GPU adds tiles depends on the rows beside it.
    """
    if option == "auto" and is_batch_invariant:
        return False
    return option != "exact" and vocab_size >= SMALLEST_VOCABULARY


def sparse_soft_embeddings(
    logits: Tensor,
    temperature: Tensor,
    stats: RowStats,
    shard: Shard,
    budget: float,
    cap: float | None = None,
) -> Tensor:
    """On a CPU `soft_embedding.sparse_product`, on a GPU `tile_product`; cap as of `row_stats`."""
    if not logits.is_cuda:
        return sparse_product(softcap(logits, cap), temperature, stats, shard, budget)
    if SOFT_EMBEDDINGS in WRONG_KERNELS:
        return tile_product(softcap(logits, cap), temperature, stats, shard, budget)
    from dllm.ops.tile_product_gpu import product_tiles, tile_product_kernels  # needs Triton

    gpu = torch.cuda.get_device_properties(logits.device)
    cut = product_tiles(shard.weight.element_size(), 10 * gpu.major + gpu.minor)
    num_sms = gpu.multi_processor_count
    return tile_product_kernels(logits, temperature, stats, shard, budget, cut, num_sms, cap)


_OFF = (None, None, None)  # top_k, top_p, min_p


@torch.library.custom_op("dllm::row_stats", mutates_args=())
def _row_stats(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    are_read: Tensor | None,
    cap: float | None,
    is_compiled: bool,
) -> list[Tensor]:
    filters = None
    if top_k is not None and top_p is not None and min_p is not None:
        filters = RowFilters(top_k, top_p, min_p)
    if logits.is_cuda:
        from dllm.ops.row_stats_gpu import row_stats_kernels  # needs Triton

        return row_stats_kernels(logits, temperature, keys, probs_dtype, filters, are_read, cap)
    return row_stats_cpu(logits, temperature, keys, probs_dtype, filters, cap, is_compiled)


@torch.library.custom_op("dllm::cutoffs", mutates_args=())
def _cutoffs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    is_any: Tensor,
) -> Tensor:
    """`filters.cutoffs`: [N] fp32. is_any: [] bool, which a compiled caller computes beside other
    numbers: where no row is filtered, which is the rule, no operator is launched for each filter.
    """
    if not bool(is_any):
        return torch.full_like(temperature, -torch.inf)
    filters = RowFilters(top_k, top_p, min_p)
    return cutoffs(logits.float(), temperature, filters, logits.shape[-1])


@_cutoffs.register_fake
def _cutoff_shape(logits: Tensor, temperature: Tensor, *filters: Tensor) -> Tensor:
    return torch.empty_like(temperature)


@_row_stats.register_fake
def _row_stats_shapes(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    *others: object,
) -> list[Tensor]:
    num_rows, vocab_size = logits.shape
    ids = [logits.new_empty(num_rows, dtype=torch.int64) for _ in range(2)]
    numbers = [temperature.new_empty(num_rows) for _ in range(4)]
    tiles = temperature.new_empty(num_rows, -(-vocab_size // tile_width(vocab_size)))
    probs = logits.new_empty(num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype)
    return [*ids, *numbers, tiles, probs]
