"""Top-k, top-p and min-p: which tokens of a row may be sampled, as one cutoff logit per row.

The order is vLLM's (Model Runner V2: temperature, min-p, top-k, top-p):

    min-p   keeps the tokens with at least `min_p` times the largest probability
    top-k   keeps the k largest logits
    top-p   renormalizes what the two have kept, and keeps the smallest set of most likely tokens
            whose probability reaches `top_p`

Each filter keeps all tokens above some logit, so the three together are one number, `cutoff`:

    kept = logits >= cutoff

Tokens equal to the cutoff are all kept. The largest logit is kept with any settings.

No row is sorted. "At least k tokens are >= t" is true for every t up to some value and false above
it; so is "the tokens >= t have at least this mass". A histogram of the row finds a narrow range of
logits that holds this value, and a bisection over all floats of the range finds it exactly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A bin of the histogram is 1/32 nat wide, so 1024 bins reach 32 nats below the largest logit. The
# last bin also holds all tokens below it, each of which has less than e^-32 of the largest mass.
NUM_BINS = 1024
BINS_PER_NAT = 32.0


class RowFilters(NamedTuple):
    """The filters of `N` rows; every filter has a value that turns it off."""

    top_k: Tensor  # [N] int32, >= 1; the vocabulary size (or more) = off
    top_p: Tensor  # [N] fp32, in (0, 1]; 1.0 = off
    min_p: Tensor  # [N] fp32, in [0, 1]; 0.0 = off

    def are_on(self, vocab_size: int) -> Tensor:
        """[N] bool."""
        return (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0)

    def rows(self, index: Tensor | slice) -> "RowFilters":
        return RowFilters(self.top_k[index], self.top_p[index], self.min_p[index])


def cutoffs(x: Tensor, temperature: Tensor, filters: RowFilters, vocab_size: int) -> Tensor:
    """The smallest kept logit of each row: [N] fp32, -inf for a row without filters, or without a
    distribution. x: [N, V or more] fp32, finite or -inf; -inf after the vocabulary.
    """
    cutoff = torch.full_like(temperature, -torch.inf)
    on = filters.are_on(vocab_size).nonzero()[:, 0]  # indices of the rows with a filter
    if len(on) > 0:
        on = on[x[on].amax(dim=-1).isfinite()]
    if len(on) > 0:
        cutoff[on] = _cutoffs(x[on], temperature[on], filters.rows(on), vocab_size)
    return cutoff


def _cutoffs(x: Tensor, temperature: Tensor, filters: RowFilters, vocab_size: int) -> Tensor:
    """Of rows all of which have a distribution and a filter: [F] fp32."""
    peak = x.amax(dim=-1)
    has_top_k, has_top_p = filters.top_k < vocab_size, filters.top_p < 1
    histogram = _Histogram.of_rows(x, peak, temperature)
    by_count = histogram.largest_with(torch.where(has_top_k, filters.top_k, 1), is_count=True)
    # The cutoff of min-p and top-k together; log(0) = -inf where min-p is off.
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
    """Token counts and masses of `F` rows, by distance from the row's largest logit."""

    x: Tensor  # [F, V]
    weights: Tensor  # [F, V], exp((x - peak) / temperature)
    bins: Tensor  # [F, V] int64, the bin of each token; bin 0 holds the largest logits
    counts: Tensor  # [F, bins] fp32, number of tokens in a bin and in all bins before it
    masses: Tensor  # [F, bins] fp32, sum of their weights

    @classmethod
    def of_rows(cls, x: Tensor, peak: Tensor, temperature: Tensor) -> "_Histogram":
        """The largest logits ``peak`` [F] of ``x`` [F, V] are finite."""
        d = (x - peak[:, None]) / temperature[:, None]
        weights = torch.exp(d)
        bins = (d * -BINS_PER_NAT).clamp(max=NUM_BINS - 1).long()
        empty = x.new_zeros(len(x), NUM_BINS)
        count = empty.scatter_add(1, bins, torch.ones_like(x)).cumsum(dim=-1)
        return cls(x, weights, bins, count, empty.scatter_add(1, bins, weights).cumsum(dim=-1))

    def largest_with(self, target: Tensor, is_count: bool) -> Tensor:
        """The largest t such that the tokens >= t reach the target: [F].

        If no t does, the smallest logit of the last bin that was searched, or -inf if that is
        empty. target: [F] fp32, a number of tokens if `is_count`, else a mass.
        """
        total = self.counts if is_count else self.masses
        # [F, 1]: the first bin in which the running total reaches the target, and the total before.
        bin_of = (total < target[:, None]).sum(dim=-1, keepdim=True).clamp(max=NUM_BINS - 1)
        above = torch.where(bin_of > 0, total.gather(1, (bin_of - 1).clamp(min=0)), 0.0)
        row, token = (self.bins == bin_of).nonzero(as_tuple=True)
        tokens = _packed(row, self.x[row, token], len(self.x), -torch.inf)  # [F, largest bin]
        measure = (
            torch.ones_like(row, dtype=torch.float32) if is_count else self.weights[row, token]
        )
        measure = _packed(row, measure, len(self.x), 0.0)

        def reaches(threshold: Tensor) -> Tensor:
            inside = torch.where(tokens >= threshold[:, None], measure, 0.0).sum(dim=-1)
            return above[:, 0] + inside >= target

        is_padding = measure == 0
        lowest = torch.where(is_padding, torch.inf, tokens).amin(dim=-1)
        lowest = torch.where(lowest == torch.inf, -torch.inf, lowest)
        return _largest(reaches, lowest, tokens.amax(dim=-1))


def _packed(row: Tensor, values: Tensor, num_rows: int, padding: float) -> Tensor:
    """`values` [K] as a matrix [rows, most values of a row]; `row` [K] is ascending."""
    lengths = torch.bincount(row, minlength=num_rows)
    starts = lengths.cumsum(0) - lengths
    packed = values.new_full((num_rows, int(lengths.max().clamp(min=1))), padding)
    packed[row, torch.arange(len(row), device=row.device) - starts[row]] = values
    return packed


def _largest(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The largest float in [low, high] for which `holds`, or `low` if there is none: [F].

    holds: takes [F] floats, returns [F] bool; true up to some float and false above it.
    """
    low, high = _ordinal(low), _ordinal(high)
    while bool((low < high).any()):
        middle = low + (high - low + 1) // 2
        is_true = holds(_from_ordinal(middle))
        low, high = torch.where(is_true, middle, low), torch.where(is_true, high, middle - 1)
    return _from_ordinal(low)


def _ordinal(x: Tensor) -> Tensor:
    """fp32 to integers in the same order: int64 in [-2^31, 2^31)."""
    # The bits of floats >= 0 are in order as they are. Those of negative floats are in reverse
    # order, so all bits but the sign are flipped.
    bits = x.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _from_ordinal(ordinal: Tensor) -> Tensor:
    bits = ordinal.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
