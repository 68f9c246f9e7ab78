"""probs @ embedding without the tokens that hardly count: soft embeddings at the price of a few.

    soft[r] = sum over tokens v of p[r, v] * embedding[v]

Each row leaves out tokens that together have at most `budget` of its probability, so

    |soft[r] - exact soft[r]| <= budget * max |embedding[v]|

in any norm (rounding aside). What a row leaves out depends on that row alone. On a CPU:

1. a quarter of the budget pays for the lightest tiles of tokens, whose masses the row statistics
   know already: most of them, where a row is sure of itself;
2. of the other tiles the tokens with a probability of budget / 1,000 or more are taken, if they and
   no others are enough: what they have is known when they are. Rows that need more take tokens down
   to budget / 16,000, or down to what the rest of the budget buys whatever the row looks like,
   (three quarters of the budget) / (number of tokens).

The sum over what remains is an embedding bag: each row reads the embeddings of its own tokens. A
row that needs more than `LARGEST_SHARE` of the vocabulary joins the exact product instead. On a GPU
whole tiles are skipped (`soft_embedding_kernel`).

`skipped_mass` is the budget: half the distance from 1 to the next number of the embedding's type.
Rounding the probabilities to that type, which the exact product does, moves a soft embedding by as
much.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.ops.row_stats import RowStats
from dllm.ops.row_stats_cpu import row_slices, tiles_of

# A row of the exact product costs about as much as a bag of a tenth of the vocabulary (bf16, one
# core with AVX-512, hidden size 2,816: 0.9 ms, against 0.25 us a token, of 32,768).
LARGEST_SHARE = 1 / 16
# Tokens are taken down to (budget / this), in turn, until they are enough.
RUNGS = (2**10, 2**14)
# The probabilities of a row, in fp32, sum to 1 no more exactly than that.
RESOLUTION = 1e-5


class Shard(NamedTuple):
    """The embeddings of the tokens in [start, end): the first rows of `weight` [rows, hidden]."""

    weight: Tensor
    start: int
    end: int


class Tokens(NamedTuple):
    """The `K` tokens that count, in the order of their rows."""

    row: Tensor  # [K] int64
    token: Tensor  # [K] int64
    probability: Tensor  # [K] fp32


def exact_product(probs: Tensor, shard: Shard) -> Tensor:
    """probs [N, V] @ embedding, over the tokens of the shard: [N, hidden] in the shard's dtype."""
    return probs[:, shard.start : shard.end] @ shard.weight[: shard.end - shard.start]


def skipped_mass(dtype: torch.dtype) -> float:
    """The share of its probability that a row may leave out."""
    return torch.finfo(dtype).eps / 2


def sparse_product_cpu(
    logits: Tensor, temperature: Tensor, stats: RowStats, shard: Shard, budget: float
) -> Tensor:
    """What `dispatch.sparse_product` returns; the host reads how many tokens are left."""
    kept = tokens_that_count(logits, temperature, stats, budget)
    num_tokens = torch.bincount(kept.row, minlength=len(logits))
    is_dense = num_tokens > LARGEST_SHARE * logits.shape[-1]
    soft = _bag(kept, len(logits), shard)
    dense = is_dense.nonzero()[:, 0]
    if len(dense) > 0:
        probs = _all_probs(logits, temperature, stats, dense, shard.weight.dtype)
        soft[dense] = exact_product(probs, shard)
    return soft


def tokens_that_count(
    logits: Tensor, temperature: Tensor, stats: RowStats, budget: float
) -> Tokens:
    """All but tokens that have at most `budget` of a row's probability together. For a CPU."""
    is_kept = heaviest_tiles(stats.tile_mass, budget / 4)
    pending = torch.arange(len(logits))
    parts = []
    if budget > RESOLUTION:
        for rung in RUNGS:
            taken = _likely_tokens(logits, temperature, stats, is_kept, pending, budget / rung)
            # In fp64: equal terms that all round up would be taken for more than they are.
            mass = torch.zeros(len(logits), dtype=torch.float64)
            mass.index_add_(0, taken.row, taken.probability.double())
            is_enough = (mass >= 1 - budget + RESOLUTION) | ~stats.log_z.isfinite()
            parts.append(Tokens(*(part[is_enough[taken.row]] for part in taken)))
            pending = pending[~is_enough[pending]]
    least = 0.75 * budget / logits.shape[-1]
    parts.append(_likely_tokens(logits, temperature, stats, is_kept, pending, least))
    together = Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
    order = together.row.argsort(stable=True)
    return Tokens(*(part[order] for part in together))


def _likely_tokens(
    logits: Tensor,
    temperature: Tensor,
    stats: RowStats,
    is_kept: Tensor,
    rows: Tensor,
    probability: float,
) -> Tokens:
    """The tokens of `rows` [K], in kept tiles, of a probability of at least so much."""
    log_p = torch.log(torch.tensor(probability))
    least = torch.maximum(stats.peak + temperature * (stats.log_z + log_p), stats.cutoff)
    least = least.clamp(min=torch.finfo(torch.float32).min)  # -inf has no probability
    parts = [Tokens(rows[:0], rows[:0], least[:0])]
    for part in row_slices(len(rows), logits.shape[-1]):
        tiles = tiles_of(logits[rows[part]])
        num_tiles, width = tiles.shape[1:]
        kept = is_kept[rows[part]].flatten().nonzero()[:, 0]
        x = tiles.reshape(-1, width).index_select(0, kept)
        row_of_tile = rows[part][kept // num_tiles]
        place = (x >= least[row_of_tile, None]).flatten().nonzero()[:, 0]
        tile = place // width
        row = row_of_tile[tile]
        token = (kept % num_tiles)[tile] * width + place % width
        d = (x.flatten()[place] - stats.peak[row]) / temperature[row]
        parts.append(Tokens(row, token, torch.exp(d - stats.log_z[row])))
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def heaviest_tiles(tile_mass: Tensor, budget: float) -> Tensor:
    """The tiles of each row [N, tiles] bool without the lightest, which have at most `budget`."""
    ordered, tile = tile_mass.sort(dim=-1)
    is_heavy = ordered.double().cumsum(dim=-1) > budget
    return torch.zeros_like(is_heavy).scatter(-1, tile, is_heavy)


def _bag(kept: Tokens, num_rows: int, shard: Shard) -> Tensor:
    """Sums of the embeddings of each row's tokens, as far as they are the shard's."""
    is_ours = (kept.token >= shard.start) & (kept.token < shard.end)
    row, token, probability = (part[is_ours] for part in kept)
    counts = torch.bincount(row, minlength=num_rows)
    return F.embedding_bag(
        token - shard.start,
        shard.weight,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=probability.to(shard.weight.dtype),
    )


def _all_probs(
    logits: Tensor, temperature: Tensor, stats: RowStats, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """The probabilities of some rows over the whole vocabulary: [K, V]."""
    probs = torch.empty(len(rows), logits.shape[-1], dtype=dtype)
    for part in row_slices(*probs.shape):
        row = rows[part]
        x = logits[row]
        d = (x - stats.peak[row, None]) / temperature[row, None] - stats.log_z[row, None]
        probs[part] = torch.exp(d).masked_fill_(x < stats.cutoff[row, None], 0.0)
    return probs
