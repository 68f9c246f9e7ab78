"""probs @ embedding without the tokens that hardly count: soft embeddings at the price of a few.

    soft[r] = sum over tokens v of p[r, v] * embedding[v]

Each row leaves out tokens that together have at most `skipped_mass` of its probability, so

    |soft[r] - exact soft[r]| <= skipped_mass * max |embedding[v]|

in any norm (rounding aside). Half of the mass is spent on the lightest tiles of tokens, whose
masses the row statistics know already; the other half on the tokens of the tiles that are left
which have less than (half the mass) / (their number). What a row leaves out depends on that row
alone: beside others it is multiplied by the tokens that they need, with a probability of zero.

`SKIPPED_MASS` is half the distance from 1 to the next number of the embedding's type. Rounding the
probabilities to that type, which the exact product does, moves a soft embedding by as much.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.config import SoftEmbedding
from dllm.row_stats import RowStats, mass_tile
from dllm.row_stats_cpu import row_slices, tile_width

# Below this many tokens the exact product costs less than choosing what to leave out of it.
SMALLEST_VOCABULARY = 2**13
# Tokens gathered at a time: with a hidden size of 2,816 in bf16, 46 MB of embeddings.
GATHERED_TOKENS = 2**13
# Above this share of the vocabulary a product with all of it is faster than gathering.
LARGEST_SHARE = 1 / 4


class Shard(NamedTuple):
    """The embeddings of the tokens in [start, end): the first rows of `weight` [rows, hidden]."""

    weight: Tensor
    start: int
    end: int


def exact_product(probs: Tensor, shard: Shard) -> Tensor:
    """probs [N, V] @ embedding, over the tokens of the shard: [N, hidden] in the shard's dtype."""
    return probs[:, shard.start : shard.end] @ shard.weight[: shard.end - shard.start]


def skipped_mass(dtype: torch.dtype) -> float:
    """The share of its probability that a row may leave out."""
    return torch.finfo(dtype).eps / 2


def uses_sparse_product(option: SoftEmbedding, vocab_size: int, device: torch.device) -> bool:
    """Whether a server with this option leaves tokens out: not if the vocabulary is small."""
    is_sparse = option == "sparse" or (option == "auto" and device.type == "cpu")
    return is_sparse and vocab_size >= SMALLEST_VOCABULARY


def sparse_product(
    logits: Tensor, temperature: Tensor, stats: RowStats, shard: Shard, budget: float
) -> Tensor:
    """The soft embedding of each row, less at most `budget` of its probability.

    On a GPU it is whole tiles of tokens that are skipped, and nothing waits for the device; on a
    CPU the tokens that are left are gathered.

    Args:
        logits: [N, V], those that `stats` are of, unchanged since.
        temperature: [N], likewise.
        budget: in [0, 1).

    Returns:
        [N, hidden] in the shard's dtype: what the shard's tokens contribute.
    """
    if logits.is_cuda:
        from dllm.soft_embedding_kernel import ProductTiles, sparse_product_kernels  # needs Triton

        tile = mass_tile(logits)
        return sparse_product_kernels(
            logits, temperature, stats, shard, budget, tile, ProductTiles()
        )
    belief = Belief.less(budget, temperature, stats, mass_tile(logits))
    is_sound = stats.log_z.isfinite()
    if bool(is_sound.all()):
        tokens = needed_tokens(logits, belief.least)
    else:  # a NaN would hide what the rows beside it need
        tokens = needed_tokens(logits[is_sound], belief.least[is_sound])
    tokens = tokens[(tokens >= shard.start) & (tokens < shard.end)]
    if len(tokens) > LARGEST_SHARE * (shard.end - shard.start):
        return exact_product(_all_probs(logits, belief, shard.weight.dtype), shard)
    soft = torch.zeros(len(logits), shard.weight.shape[-1])
    for some in tokens.split(GATHERED_TOKENS):
        probs = belief.probs(logits[:, some], belief.least[:, some // belief.tile_width])
        soft += probs.to(shard.weight.dtype) @ shard.weight[some - shard.start]
    return soft.to(shard.weight.dtype)


class Belief(NamedTuple):
    """What `N` rows believe, once what hardly counts is left out."""

    peak: Tensor  # [N]
    temperature: Tensor  # [N]
    log_z: Tensor  # [N]
    least: Tensor  # [N, tiles], the smallest logit of each tile that counts; +inf: none does
    tile_width: int

    @classmethod
    def less(cls, budget: float, temperature: Tensor, stats: RowStats, tile_width: int) -> "Belief":
        """The distributions of `stats` without the tokens that have `budget` of it together."""
        is_kept = heaviest_tiles(stats.tile_mass, budget / 2)
        num_kept = is_kept.sum(dim=-1).clamp(min=1) * tile_width
        log_p = torch.log(budget / 2 / num_kept)
        least = torch.maximum(stats.peak + temperature * (stats.log_z + log_p), stats.cutoff)
        least = least.clamp(min=torch.finfo(torch.float32).min)  # -inf has no probability
        is_kept &= stats.log_z.isfinite()[:, None]
        least = torch.where(is_kept, least[:, None], torch.inf)
        return cls(stats.peak, temperature, stats.log_z, least, tile_width)

    def rows(self, index: slice) -> "Belief":
        """What some of the rows believe."""
        return Belief(
            self.peak[index],
            self.temperature[index],
            self.log_z[index],
            self.least[index],
            self.tile_width,
        )

    def probs(self, x: Tensor, least: Tensor) -> Tensor:
        """Probabilities of logits `x` [N, ...]: 0 below `least`, which is broadcast."""
        shape = (-1, *[1] * (x.ndim - 1))
        d = (x - self.peak.view(shape)) / self.temperature.view(shape)
        return torch.where(x >= least, torch.exp(d - self.log_z.view(shape)), 0.0)


def heaviest_tiles(tile_mass: Tensor, budget: float) -> Tensor:
    """The tiles of each row [N, tiles] bool without the lightest, which have at most `budget`."""
    ordered, tile = tile_mass.sort(dim=-1)
    is_heavy = ordered.double().cumsum(dim=-1) > budget
    return torch.zeros_like(is_heavy).scatter(-1, tile, is_heavy)


def needed_tokens(logits: Tensor, least: Tensor) -> Tensor:
    """The ids, rising, of the tokens that count in any row.

    logits: [N, V] without a NaN; least: [N, tiles].
    """
    width = tile_width(logits.shape[-1])
    whole = logits.shape[-1] // width * width
    is_needed = torch.zeros(logits.shape[-1], dtype=torch.bool)
    for rows in row_slices(*logits.shape):
        for start, end in ((0, whole), (whole, logits.shape[-1])):
            if start < end:
                tiles = logits[rows, start:end].unflatten(-1, (-1, min(width, end - start)))
                least_of = least[rows, start // width : start // width + tiles.shape[1]]
                excess = (tiles - least_of[:, :, None]).amax(dim=0)
                is_needed[start:end] |= excess.flatten() >= 0
    return is_needed.nonzero()[:, 0]


def _all_probs(logits: Tensor, belief: Belief, dtype: torch.dtype) -> Tensor:
    """The probabilities of the whole vocabulary: [N, V]."""
    probs = torch.empty_like(logits, dtype=dtype)
    width = belief.tile_width
    for rows in row_slices(*logits.shape):
        least = belief.least[rows].repeat_interleave(width, dim=-1)[:, : logits.shape[-1]]
        probs[rows] = belief.rows(rows).probs(logits[rows], least).to(dtype)
    return probs
