"""Which tokens of a row may be drawn: top-k, top-p and min-p, as one smallest kept logit per row.

The order is vLLM's (Model Runner V2: temperature, min-p, top-k, top-p). min-p keeps the tokens with
at least `min_p` times the largest probability, top-k the k largest logits, and top-p, over what the
two have left and renormalized to 1, the smallest set of largest tokens whose probability reaches
`top_p`. Each keeps all tokens above some logit, so together they are one number, `cutoff`:

    kept = logits >= cutoff

Tokens that tie with the cutoff are all kept, and so is the largest logit, whatever is asked for.

No row is sorted. "At least k tokens are >= t" and "the tokens >= t have at least this mass" hold up
to some t and nowhere above it. A histogram of the row says in which narrow range of logits that is,
and a bisection over the floats of that range, in order, finds it exactly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The histogram's: a token of the last bin, and of all below it, has less than e^-32 of the mass of
# the most probable one. A bin is 1/32 nat wide.
NUM_BINS = 1024
BINS_PER_NAT = 32.0


class RowFilters(NamedTuple):
    """The filters of `N` rows; each has a value that turns it off."""

    top_k: Tensor  # [N] int32, >= 1; the vocabulary size (or more) = off
    top_p: Tensor  # [N] fp32, in (0, 1]; 1.0 = off
    min_p: Tensor  # [N] fp32, in [0, 1]; 0.0 = off

    def rows(self, index: Tensor | slice) -> "RowFilters":
        """The filters of some rows."""
        return RowFilters(self.top_k[index], self.top_p[index], self.min_p[index])


def cutoffs(x: Tensor, temperature: Tensor, filters: RowFilters, vocab_size: int) -> Tensor:
    """The smallest kept logit of each row: [N] fp32, -inf for a row without filters.

    x: [N, V or more] fp32, finite or -inf, with -inf behind the vocabulary; temperature: [N], > 0.
    A row without a finite logit, or with a NaN, counts as one without filters. Reads from the data
    which rows and tokens to look at, so this is for a CPU; on a GPU the kernel searches.
    """
    is_on = (filters.top_k < vocab_size) | (filters.top_p < 1) | (filters.min_p > 0)
    cutoff = torch.full_like(temperature, -torch.inf)
    on = is_on.nonzero()[:, 0]
    if len(on) > 0:
        on = on[x[on].amax(dim=-1).isfinite()]
    if len(on) > 0:
        cutoff[on] = _cutoffs(x[on], temperature[on], filters.rows(on), vocab_size)
    return cutoff


def _cutoffs(x: Tensor, temperature: Tensor, filters: RowFilters, vocab_size: int) -> Tensor:
    """The cutoffs of rows that have a distribution and a filter each."""
    peak = x.amax(dim=-1)
    has_top_k, has_top_p = filters.top_k < vocab_size, filters.top_p < 1
    histogram = _Histogram.of_rows(x, peak, temperature)
    by_count = histogram.largest_with(torch.where(has_top_k, filters.top_k, 1), is_count=True)
    floor = torch.maximum(
        peak + temperature * torch.log(filters.min_p),
        torch.where(has_top_k, by_count, -torch.inf),
    )
    kept_mass = torch.where(x >= floor[:, None], histogram.weights, 0.0).sum(dim=-1)
    by_mass = histogram.largest_with(
        torch.where(has_top_p, filters.top_p * kept_mass, 0.0), is_count=False
    )
    cutoff = torch.maximum(floor, torch.where(has_top_p, by_mass, -torch.inf))
    return torch.minimum(cutoff, peak)


class _Histogram(NamedTuple):
    """How many tokens, and how much mass, lie how far below the peak, `F` rows of them."""

    x: Tensor  # [F, V]
    weights: Tensor  # [F, V], exp((x - peak) / temperature)
    bins: Tensor  # [F, V] int64, falling with x
    counts: Tensor  # [F, bins] fp32, of the tokens of a bin and of those before it
    masses: Tensor  # [F, bins] fp32, likewise

    @classmethod
    def of_rows(cls, x: Tensor, peak: Tensor, temperature: Tensor) -> "_Histogram":
        d = (x - peak[:, None]) / temperature[:, None]
        weights = torch.exp(d)
        bins = (d * -BINS_PER_NAT).clamp(max=NUM_BINS - 1).long()
        empty = x.new_zeros(len(x), NUM_BINS)
        count = empty.scatter_add(1, bins, torch.ones_like(x)).cumsum(dim=-1)
        return cls(x, weights, bins, count, empty.scatter_add(1, bins, weights).cumsum(dim=-1))

    def largest_with(self, target: Tensor, is_count: bool) -> Tensor:
        """The largest t such that the tokens >= t are that many, or have that mass: [F].

        target: [F] fp32. Where rounding, or a target out of reach, leaves none, the smallest
        logit of the last bin that was searched.
        """
        total = self.counts if is_count else self.masses
        bin_of = (total < target[:, None]).sum(dim=-1, keepdim=True).clamp(max=NUM_BINS - 1)
        above = torch.where(bin_of > 0, total.gather(1, (bin_of - 1).clamp(min=0)), 0.0)
        row, token = (self.bins == bin_of).nonzero(as_tuple=True)
        tokens = _packed(row, self.x[row, token], len(self.x), -torch.inf)
        measure = (
            torch.ones_like(row, dtype=torch.float32) if is_count else self.weights[row, token]
        )
        measure = _packed(row, measure, len(self.x), 0.0)

        def reaches(threshold: Tensor) -> Tensor:
            inside = torch.where(tokens >= threshold[:, None], measure, 0.0).sum(dim=-1)
            return above[:, 0] + inside >= target

        is_padding = measure == 0
        lowest = torch.where(is_padding, torch.inf, tokens).amin(dim=-1)
        return _largest(reaches, lowest, tokens.amax(dim=-1))


def _packed(row: Tensor, values: Tensor, num_rows: int, padding: float) -> Tensor:
    """Values [K], in the order of their rows, as a tensor [rows, values of the longest row]."""
    lengths = torch.bincount(row, minlength=num_rows)
    starts = lengths.cumsum(0) - lengths
    packed = values.new_full((num_rows, int(lengths.max().clamp(min=1))), padding)
    packed[row, torch.arange(len(row)) - starts[row]] = values
    return packed


def _largest(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The largest float in [low, high] of which `holds` is true, or `low` if there is none: [F].

    `holds` is true up to some float and false above it.
    """
    low, high = _ordinal(low), _ordinal(high)
    while bool((low < high).any()):
        middle = low + (high - low + 1) // 2
        is_true = holds(_from_ordinal(middle))
        low, high = torch.where(is_true, middle, low), torch.where(is_true, high, middle - 1)
    return _from_ordinal(low)


def _ordinal(x: Tensor) -> Tensor:
    """Floats to integers in the same order: fp32 to int64 in [-2^31, 2^31)."""
    bits = x.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _from_ordinal(ordinal: Tensor) -> Tensor:
    bits = ordinal.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
