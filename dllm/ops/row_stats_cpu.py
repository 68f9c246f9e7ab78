"""Row statistics on a CPU: few rows at a time, so that they stay in the cache; little noise.

A row is read once from memory. A few rows at a time fit the cache, so the later passes over them
(tile maxima, sums, probabilities if asked for) read them from there. If the caller is compiled, the
passes are compiled too; otherwise they run as ordinary torch operations.

The Gumbel sample is exact, but the two logarithms of its noise are computed for a few tiles of each
row only. The noise falls as the random word rises. So no token of a tile has a noisy value above

    bound = (tile max - row max) / T + gumbel(smallest word of the tile)

Rounding does not change that, because each operation is monotone. First the tile with the largest
bound is searched for its best token. Then only tiles whose bound reaches that value are searched.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.ops.filters import RowFilters, cutoffs
from dllm.ops.noise import NO_KEY, gumbel_from_bits, smallest_words, token_bits

# Tokens of a tile: wide enough for vectorized reductions, and narrow enough that most tiles can be
# skipped.
TILE_TOKENS = 1024
# Logits that are worked on at a time: 8 MiB of fp32, at least two rows of any vocabulary in use. No
# result depends on it.
WORKSPACE_LOGITS = 2**21
EXP_UNDERFLOWS = -104.0  # exp of this is 0 in fp32

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RowTile(NamedTuple):
    """`R` rows, cut into tiles of tokens; -inf fills the last tile."""

    x: Tensor  # [R, tiles, width] fp32
    tile_max: Tensor  # [R, tiles]
    peak: Tensor  # [R]
    temperature: Tensor  # [R]
    keys: Tensor  # [R, 2] int64


def tile_width(vocab_size: int) -> int:
    """Tokens of a tile; a small vocabulary is a single tile."""
    return min(vocab_size, TILE_TOKENS)


def row_stats_cpu(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None,
    is_compiled: bool,
) -> list[Tensor]:
    """The fields of `RowStats` in order; `probs` is empty if `probs_dtype` is None."""
    num_rows, vocab_size = logits.shape
    probs = logits.new_empty(num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype)
    parts = []
    for rows in row_slices(num_rows, vocab_size):
        some_filters = None if filters is None else filters.rows(rows)
        tile = _tile_of(tiles_of(logits[rows]), temperature[rows], keys[rows])
        tile, cutoff = _filter(tile, some_filters, vocab_size)
        parts.append(_statistics(tile, cutoff, is_compiled))
        if probs_dtype:
            _write_probs(tile, parts[-1][4], probs[rows], is_compiled)
    return [*(torch.cat(column) for column in zip(*parts, strict=True)), probs]


def row_slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows, of nearly equal size, that fit the workspace.

    None has a single row if there are two or more: ``torch.compile`` specializes size 1 and would
    compile a second version for it.
    """
    most = max(WORKSPACE_LOGITS // vocab_size, 2)
    count = min(-(-num_rows // most), max(num_rows // 2, 1))
    for index in range(count):
        yield slice(num_rows * index // count, num_rows * (index + 1) // count)


def fused(function: Callable[Arguments, Result], is_compiled: bool) -> Callable[Arguments, Result]:
    """``function``, compiled for any shape if the caller is compiled."""
    return _compiled(function) if is_compiled else function


@functools.cache
def _compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    return torch.compile(function, dynamic=True)


def tiles_of(logits: Tensor) -> Tensor:
    """[R, V] to [R, tiles, width] fp32, -inf after the vocabulary; a view where possible."""
    vocab_size = logits.shape[-1]
    width = tile_width(vocab_size)
    x = logits.float()
    if vocab_size % width:
        x = F.pad(x, (0, -vocab_size % width), value=-torch.inf)
    return x.view(len(x), -1, width)


def _tile_of(x: Tensor, temperature: Tensor, keys: Tensor) -> RowTile:
    tile_max = x.amax(dim=-1)
    return RowTile(x, tile_max, tile_max.amax(dim=-1), temperature, keys)


def _filter(tile: RowTile, filters: RowFilters | None, vocab_size: int) -> tuple[RowTile, Tensor]:
    """The rows with -inf at tokens that the filters exclude, and the cutoff of each: [R]."""
    if filters is None:
        return tile, torch.full_like(tile.peak, -torch.inf)
    cutoff = cutoffs(tile.x.flatten(1), tile.temperature, filters, vocab_size)
    if bool((cutoff > -torch.inf).any()):
        x = torch.where(tile.x < cutoff[:, None, None], -torch.inf, tile.x)
        tile = _tile_of(x, tile.temperature, tile.keys)
    return tile, cutoff


def _statistics(tile: RowTile, cutoff: Tensor, is_compiled: bool) -> tuple[Tensor, ...]:
    """The fields of `RowStats` in order, except `probs`."""
    z_of, s_of = fused(_sums, is_compiled)(tile.x, tile.peak, tile.temperature)  # [R, tiles]
    z, s = z_of.sum(dim=-1), s_of.sum(dim=-1)  # [R]
    has_distribution = z > 0  # false if x - peak is NaN: all logits -inf, or one is NaN
    log_z = torch.where(has_distribution, torch.log(z), torch.inf)
    entropy = torch.where(has_distribution, log_z - s / z, torch.inf)
    tile_mass = torch.where(has_distribution[:, None], z_of / z[:, None], 0.0)
    argmax = _argmax(tile)
    # Rows in which nothing is drawn are skipped if no other is among them: one row alone would be
    # compiled as a special case.
    draws_nothing = tile.keys[:, 0] == NO_KEY
    sample = argmax
    if not bool(draws_nothing.all()):
        sample = torch.where(draws_nothing, argmax, _sample(tile, is_compiled))
    return argmax, sample, entropy, tile.peak, log_z, cutoff, tile_mass


def _sums(x: Tensor, peak: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Per tile, with d = (x - peak) / temperature: sum exp(d) and sum d exp(d), [R, tiles]."""
    d = (x - peak[:, None, None]) / temperature[:, None, None]
    d = d.clamp(min=EXP_UNDERFLOWS)  # exp(d) is 0 there anyway; -inf * 0 would be NaN
    e = torch.exp(d)
    return e.sum(dim=-1), (d * e).sum(dim=-1)


def _argmax(tile: RowTile) -> Tensor:
    """The lowest id with the largest logit: [R] int64; 0 if the row has no finite logit."""
    first = (tile.tile_max == tile.peak[:, None]).int().argmax(dim=-1)
    inside = tile.x[torch.arange(len(first)), first] == tile.peak[:, None]
    return first * tile.x.shape[-1] + inside.int().argmax(dim=-1)


def _sample(tile: RowTile, is_compiled: bool) -> Tensor:
    """argmax((x - peak) / temperature + gumbel): [R] int64, ties go to the lowest id."""
    num_rows, num_tiles, width = tile.x.shape
    ids = torch.arange(num_tiles * width, dtype=torch.int32).view(1, num_tiles, width)
    words = fused(smallest_words, is_compiled)(tile.keys, ids)  # [R, tiles]
    largest = (tile.tile_max - tile.peak[:, None]) / tile.temperature[:, None]
    bound = largest + gumbel_from_bits(words)  # [R, tiles]

    # The best noisy value in the tile with the largest bound: a value that the sample has at least.
    every = torch.arange(num_rows)
    reached = _noisy_max(tile, every, bound.argmax(dim=-1), is_compiled)[0]  # [R]
    # The K tiles (row, place) that may hold a better token, first by bound, then token by token.
    row, place = (bound >= reached[:, None]).nonzero(as_tuple=True)
    may_hold = fused(_may_reach, is_compiled)(_Tokens.of_tiles(tile, row, place), reached[row])
    row, place = row[may_hold], place[may_hold]
    value, inside = _noisy_max(tile, row, place, is_compiled)
    # Back to [R, tiles]: the best value of each searched tile, and its place in the tile.
    best = torch.full_like(bound, -torch.inf).index_put((row, place), value)
    ids_of = torch.zeros_like(bound, dtype=torch.int64).index_put((row, place), inside)
    chosen = best.argmax(dim=-1)
    return chosen * width + ids_of[every, chosen]


class _Tokens(NamedTuple):
    """`K` tiles of tokens, from any rows."""

    d: Tensor  # [K, width], (x - peak) / temperature
    keys: Tensor  # [K, 2]
    ids: Tensor  # [K, width] int64

    @classmethod
    def of_tiles(cls, tile: RowTile, row: Tensor, place: Tensor) -> "_Tokens":
        width = tile.x.shape[-1]
        d = (tile.x[row, place] - tile.peak[row, None]) / tile.temperature[row, None]
        return cls(d, tile.keys[row], place[:, None] * width + torch.arange(width))


def _noisy_max(
    tile: RowTile, row: Tensor, place: Tensor, is_compiled: bool
) -> tuple[Tensor, Tensor]:
    """The largest noisy value d + gumbel of each of K tiles, and its place in the tile: [K]."""
    return fused(_noisy, is_compiled)(_Tokens.of_tiles(tile, row, place)).max(dim=-1)


def _noisy(tokens: _Tokens) -> Tensor:
    """d + gumbel: [K, width]."""
    return tokens.d + gumbel_from_bits(token_bits(tokens.keys, tokens.ids))


def _may_reach(tokens: _Tokens, value: Tensor) -> Tensor:
    """Whether a token of each tile may have a noisy value of `value` or more: [K] bool.

    gumbel = -log(-log1p(-v)) <= -log(v), so d + gumbel >= value needs v <= exp(d - value). Testing
    this takes one exponential instead of two logarithms. The addend 0.001 keeps rounding from
    excluding a winner: it is a thousand times the rounding error of any d that can win (|d| < 60).
    """
    v = token_bits(tokens.keys, tokens.ids).to(torch.float32) * 2.0**-32
    return (torch.exp(tokens.d - value[:, None] + 0.001) - v).amax(dim=-1) >= 0


def _write_probs(tile: RowTile, log_z: Tensor, out: Tensor, is_compiled: bool) -> None:
    probs = fused(_probs, is_compiled)(tile.x, tile.peak, tile.temperature, log_z, out.dtype)
    out.copy_(probs.view(len(out), -1)[:, : out.shape[-1]])


def _probs(
    x: Tensor, peak: Tensor, temperature: Tensor, log_z: Tensor, dtype: torch.dtype
) -> Tensor:
    """exp(d) / z, [R, tiles, width]; 0 throughout for a row without a distribution."""
    d = (x - peak[:, None, None]) / temperature[:, None, None]
    scale = torch.exp(-log_z)[:, None, None]
    return torch.where(scale > 0, torch.exp(d) * scale, 0.0).to(dtype)
