"""Soft embeddings, probs @ embedding, computed without the tokens of negligible probability.

    soft[r] = sum over tokens v of p[r, v] * embedding[v]

Each row leaves out tokens that together have at most `budget` of its probability, so

    |soft[r] - exact soft[r]| <= budget * max |embedding[v]|

in any norm (rounding aside). What a row leaves out depends on that row alone. On a GPU whole tiles
of tokens are left out (`tile_product`). On a CPU:

1. The lightest tiles of tokens are dropped, up to a quarter of the budget. The row statistics hold
   the mass of each tile. Where the model is sure of a token, nearly all tiles are dropped.
2. In the other tiles the tokens with a probability of at least budget / 1,024 are kept. Their sum
   shows whether what is left out fits the budget. If not, the floor is lowered to budget / 16,384.
   If that is not enough either, the floor is (3/4 of the budget) / (number of tokens): all tokens
   below it together fit what step 1 left of the budget, for any distribution.

The sum over the kept tokens is an embedding bag: each row reads the embeddings of its own tokens. A
row that keeps more than `LARGEST_SHARE` of the vocabulary uses the exact product instead.

`skipped_mass` gives the budget: half the distance from 1 to the next number of the embedding's
type. The exact product rounds the probabilities to that type, which changes the result as much.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.ops.row_stats import RowStats, tiles_of
from dllm.ops.row_stats_cpu import row_slices

# Share of the vocabulary up to which a row's sum is an embedding bag. A row of the exact product
# costs about as much as a bag of a tenth of the vocabulary (bf16, one core with AVX-512, hidden
# size 2,816, 32,768 tokens: 0.9 ms for the product, 0.25 us for each token of a bag).
LARGEST_SHARE = 1 / 16
# Probability floors, tried in order: keep tokens above budget / 1,024; if their mass is less than
# 1 - budget, try again with budget / 16,384.
FLOOR_DIVISORS = (2**10, 2**14)
# The fp32 probabilities of a row sum to 1 with an error of up to this.
RESOLUTION = 1e-5


class Shard(NamedTuple):
    """The embeddings of the tokens in [start, end): one rank's part of the vocabulary."""

    weight: Tensor  # [rows, hidden]; row i is token start + i, rows from end - start on are unused
    start: int
    end: int


class Tokens(NamedTuple):
    """`K` tokens that are kept, sorted by row."""

    row: Tensor  # [K] int64
    token: Tensor  # [K] int64
    probability: Tensor  # [K] fp32


def exact_product(probs: Tensor, shard: Shard) -> Tensor:
    """probs [N, V] @ embedding, over the tokens of the shard: [N, hidden] in the shard's dtype."""
    return probs[:, shard.start : shard.end] @ shard.weight[: shard.end - shard.start]


def skipped_mass(dtype: torch.dtype) -> float:
    """The budget, for embeddings of this type."""
    return torch.finfo(dtype).eps / 2


def sparse_product(
    logits: Tensor, temperature: Tensor, stats: RowStats, shard: Shard, budget: float
) -> Tensor:
    """The sum over the shard's tokens, [N, hidden] in its dtype; `stats` are of these logits."""
    kept = tokens_that_count(logits, temperature, stats, budget)
    num_tokens = torch.bincount(kept.row, minlength=len(logits))
    is_dense = num_tokens > LARGEST_SHARE * logits.shape[-1]
    soft = _bag(kept, len(logits), shard)
    dense = is_dense.nonzero()[:, 0]
    if len(dense) > 0:
        probs = all_probs(logits, temperature, stats, dense, shard.weight.dtype)
        soft[dense] = exact_product(probs, shard)
    return soft


def tokens_that_count(
    logits: Tensor, temperature: Tensor, stats: RowStats, budget: float
) -> Tokens:
    """The others have at most `budget` probability in each row."""
    is_kept = heaviest_tiles(stats.tile_mass, budget / 4)
    pending = torch.arange(len(logits))  # rows whose tokens are not chosen yet
    parts = []
    # A budget below the error of the sums cannot be checked by them.
    if budget > RESOLUTION:
        for divisor in FLOOR_DIVISORS:
            taken = _likely_tokens(logits, temperature, stats, is_kept, pending, budget / divisor)
            # In fp64: in fp32 many equal terms that round up would sum to more than their mass.
            mass = torch.zeros(len(logits), dtype=torch.float64)
            mass.index_add_(0, taken.row, taken.probability.double())
            is_enough = (mass >= 1 - budget + RESOLUTION) | ~stats.log_z.isfinite()
            parts.append(Tokens(*(part[is_enough[taken.row]] for part in taken)))
            pending = pending[~is_enough[pending]]
    # A floor that needs no check, for the rows that are left.
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
    """The tokens of `rows` [R] with at least `probability`, in tiles that are kept."""
    # Compare logits, not probabilities: then exp is taken of the chosen tokens only.
    log_p = torch.log(torch.tensor(probability))
    least = torch.maximum(stats.peak + temperature * (stats.log_z + log_p), stats.cutoff)
    # A finite limit, so that tokens at -inf are never chosen.
    least = least.clamp(min=torch.finfo(torch.float32).min)
    parts = [Tokens(rows[:0], rows[:0], least[:0])]
    for part in row_slices(len(rows), logits.shape[-1]):
        tiles = tiles_of(logits[rows[part]])  # [rows of the part, tiles, width]
        num_tiles, width = tiles.shape[1:]
        kept = is_kept[rows[part]].flatten().nonzero()[:, 0]
        x = tiles.reshape(-1, width).index_select(0, kept)  # [kept tiles, width]
        row_of_tile = rows[part][kept // num_tiles]
        place = (x >= least[row_of_tile, None]).flatten().nonzero()[:, 0]
        tile = place // width  # index among the kept tiles
        row = row_of_tile[tile]
        token = (kept % num_tiles)[tile] * width + place % width
        d = (x.flatten()[place] - stats.peak[row]) / temperature[row]
        parts.append(Tokens(row, token, torch.exp(d - stats.log_z[row])))
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def heaviest_tiles(tile_mass: Tensor, budget: float) -> Tensor:
    """[N, tiles] bool: all but each row's lightest tiles, which have at most `budget` in total."""
    ordered, tile = tile_mass.sort(dim=-1)  # lightest first
    is_heavy = ordered.double().cumsum(dim=-1) > budget
    return torch.zeros_like(is_heavy).scatter(-1, tile, is_heavy)


def _bag(kept: Tokens, num_rows: int, shard: Shard) -> Tensor:
    """[num_rows, hidden], without tokens of other shards."""
    is_ours = (kept.token >= shard.start) & (kept.token < shard.end)
    row, token, probability = (part[is_ours] for part in kept)
    counts = torch.bincount(row, minlength=num_rows)
    return F.embedding_bag(
        token - shard.start,
        shard.weight,
        counts.cumsum(0) - counts,  # where each row's tokens begin
        mode="sum",
        per_sample_weights=probability.to(shard.weight.dtype),
    )


def all_probs(
    logits: Tensor, temperature: Tensor, stats: RowStats, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Of the rows `rows` [R]: [R, V]; 0 throughout for a row without a distribution."""
    probs = logits.new_empty(len(rows), logits.shape[-1], dtype=dtype)
    for part in row_slices(*probs.shape):
        row = rows[part]
        x = logits[row]
        d = (x - stats.peak[row, None]) / temperature[row, None] - stats.log_z[row, None]
        is_out = (x < stats.cutoff[row, None]) | stats.log_z[row, None].isinf()
        probs[part] = torch.exp(d).masked_fill_(is_out, 0.0)
    return probs
