"""Soft embeddings as a matrix product without the tiles of the vocabulary that have no mass.

    soft[r] = sum over the tiles that row r keeps, over their tokens v, of p[r, v] * embedding[v]

A tile is `TILE` tokens with ids side by side. A row keeps the tiles that have more than
budget / (number of tiles) of its probability. It leaves out at most all of the tiles, each with at
most that much, so together at most the budget, and in any norm

    |soft[r] - exact soft[r]| <= sum over left-out v of p[r, v] |embedding[v]|
                              <= budget * max |embedding[v]|                    (rounding aside)

What a row keeps depends on that row alone. A row that is sure of its token keeps a tile or two of
thousands; of a row that is sure of nothing every tile has mass, and the product is the exact one.

This file holds the definition, in plain torch, and the plan of the kernels (`tile_product_gpu`),
which need all of a program's rows to skip a tile. Rows are sorted by certainty and cut into groups,
and a group multiplies the tiles that any of its rows keeps. To the other rows of the group such a
tile adds zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.ops.row_stats import RowStats
from dllm.ops.soft_embedding import Shard, all_probs, exact_product

# Tokens of a tile, those of one step of a matrix product. 128 sure rows with a few tokens each keep
# a tenth of such tiles, and would keep most tiles of 1,024 tokens.
TILE = 64


def tile_product(
    logits: Tensor, temperature: Tensor, stats: RowStats, shard: Shard, budget: float
) -> Tensor:
    """The definition. Arguments and result as of `sparse_product`; needs memory for several tensors
    of [N, V].
    """
    rows = torch.arange(len(logits), device=logits.device)
    probs = all_probs(logits, temperature, stats, rows, torch.float32)
    kept = without_light_tiles(probs, budget)
    return exact_product(kept.to(shard.weight.dtype), shard)


def without_light_tiles(probs: Tensor, budget: float) -> Tensor:
    """`probs` [N, V] with 0 in the tiles that their rows leave out."""
    vocab_size = probs.shape[1]
    tiles = F.pad(probs, (0, -vocab_size % TILE)).unflatten(1, (-1, TILE))
    is_heavy = tiles.sum(dim=2, keepdim=True) > least_mass(vocab_size, budget)
    return torch.where(is_heavy, tiles, 0.0).flatten(1)[:, :vocab_size]


def least_mass(vocab_size: int, budget: float) -> float:
    """A row keeps the tiles that have more than this probability."""
    return budget / -(-vocab_size // TILE)


def tiles_of_groups(is_used: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of the tiles, those in use first, ascending: [groups, tiles] int32; and how many are
    in use: [groups] int32. is_used: [groups, tiles] int8, 0 or 1. Does not wait for the device.
    """
    tiles = is_used.argsort(dim=1, descending=True, stable=True)
    return tiles.int(), is_used.sum(dim=1, dtype=torch.int32)
