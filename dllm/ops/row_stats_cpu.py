"""Row statistics on a CPU: few rows at a time, so that all passes but the first find them in the
cache. If the caller is compiled, the passes are compiled, too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from dllm.ops.filters import RowFilters, cutoffs
from dllm.ops.noise import NO_KEY
from dllm.ops.row_stats import drawn_tokens, softcap, tiles_of

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


def row_stats_cpu(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs_dtype: torch.dtype | None,
    filters: RowFilters | None,
    cap: float | None,
    is_compiled: bool,
) -> list[Tensor]:
    """As `row_stats_gpu.row_stats_kernels`."""
    num_rows, vocab_size = logits.shape
    probs = logits.new_empty(num_rows, vocab_size if probs_dtype else 0, dtype=probs_dtype)
    parts = []
    for rows in row_slices(num_rows, vocab_size):
        some_filters = None if filters is None else filters.rows(rows)
        x = tiles_of(softcap(logits[rows], cap))
        tile = _tile_of(x, temperature[rows], keys[rows])
        tile, cutoff = _filter(tile, some_filters, vocab_size)
        parts.append(_statistics(tile, cutoff, vocab_size, is_compiled))
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
    return _compiled(function) if is_compiled else function


@functools.cache
def _compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    return torch.compile(function, dynamic=True)


def _tile_of(x: Tensor, temperature: Tensor, keys: Tensor) -> RowTile:
    tile_max = x.amax(dim=-1)
    return RowTile(x, tile_max, tile_max.amax(dim=-1), temperature, keys)


def _filter(tile: RowTile, filters: RowFilters | None, vocab_size: int) -> tuple[RowTile, Tensor]:
    """Rows with -inf at tokens that the filters exclude, and the cutoff of each: [R]."""
    if filters is None:
        return tile, torch.full_like(tile.peak, -torch.inf)
    cutoff = cutoffs(tile.x.flatten(1), tile.temperature, filters, vocab_size)
    if bool((cutoff > -torch.inf).any()):
        x = torch.where(tile.x < cutoff[:, None, None], -torch.inf, tile.x)
        tile = _tile_of(x, tile.temperature, tile.keys)
    return tile, cutoff


def _statistics(
    tile: RowTile, cutoff: Tensor, vocab_size: int, is_compiled: bool
) -> tuple[Tensor, ...]:
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
        given = tile.x, z_of, tile.peak, tile.temperature, tile.keys
        sample = torch.where(draws_nothing, argmax, fused(drawn_tokens, is_compiled)(*given))
    sample = sample.clamp(max=vocab_size - 1)  # where a row has no distribution
    return argmax, sample, entropy, tile.peak, log_z, cutoff, tile_mass


def _sums(x: Tensor, peak: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Per tile, with d = (x - peak) / temperature: sum exp(d) and sum d exp(d), [R, tiles]."""
    d = (x - peak[:, None, None]) / temperature[:, None, None]
    d = d.clamp(min=EXP_UNDERFLOWS)  # exp(d) is 0 there anyway; -inf * 0 would be NaN
    e = torch.exp(d)
    return e.sum(dim=-1), (d * e).sum(dim=-1)


def _argmax(tile: RowTile) -> Tensor:
    """[R] int64, the lowest id; 0 if the row has no finite logit."""
    first = (tile.tile_max == tile.peak[:, None]).int().argmax(dim=-1)
    inside = tile.x[torch.arange(len(first)), first] == tile.peak[:, None]
    return first * tile.x.shape[-1] + inside.int().argmax(dim=-1)


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
