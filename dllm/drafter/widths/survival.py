"""How likely a draft survives verification, learned from what the target did with earlier ones.

A draft is kept only if all before it are, so its survival is a product of conditional acceptances;
minus their logarithms are hazards, which add up. A hazard is a product of three rates:

    survival(request, j) = exp(-sum over i <= j of position[i] * request * confidence[bin(i)])

    position    of all requests, by place in the draft block
    request     how this one deviates from the others
    confidence  how drafts deviate about which the drafter is as sure as about this one

Each rate is (rejections + k) / (exposure + k / expected), the mean of a Gamma distribution;
exposure is what the other two rates led one to expect, and counts fade with time. This is Cox's
model of proportional hazards: what a request gets wrong at one place says something about all of
them, so that few steps tell an easy request from a hard one, and a new one starts as an average
one.
"""

import numpy as np

FIRST_GUESS = -np.log(0.8)  # hazard of a position before anything is known
# k: how many rejections the expected rate weighs as much as.
POSITION_STRENGTH, REQUEST_STRENGTH, BIN_STRENGTH = 1.0, 1.0, 4.0
# What is kept of earlier counts: of all requests for each row verified, of a request for each step
# in which others or it were verified.
SHARED_KEPT, REQUEST_KEPT = 1 - 1 / 256, 0.95
HAZARDS = -np.log([0.998, 0.002])  # no position is surer than this to be kept, or to be rejected
HOPELESS = 50.0  # a hazard beyond which nothing changes
# Edges of the bins by the drafter's probability; the sure ones differ most.
BIN_EDGES = np.array([0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99, 0.997])
NUM_BINS = len(BIN_EDGES) + 1


class Survival:
    """Estimates for every request slot; ``reset`` a slot when another request takes it."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        # Rejections and exposure of each.
        self._by_position = np.zeros((2, num_drafts))
        self._by_request = np.zeros((2, num_slots))
        self._by_bin = np.zeros((2, NUM_BINS))
        self._position = self._position_rates()

    def reset(self, slots: np.ndarray) -> None:
        """Forget what is known of these requests."""
        self._by_request[:, slots] = 0.0

    def exposure(self, slots: np.ndarray) -> np.ndarray:
        """``[rows]``: how much these requests have been tried, in rejections of an average one."""
        return self._by_request[1, slots]

    def of(self, slots: np.ndarray, bins: np.ndarray | None = None) -> np.ndarray:
        """``[rows, N]``, not increasing along a row: that drafts up to each position are all kept.

        Args:
            bins: ``[rows, N]``, of the drafter's confidence (``bins_of``); None where unknown.
        """
        hazards = self._position * self._requests(slots) * self._bins(bins)
        survival: np.ndarray = np.exp(-hazards.cumsum(axis=1))
        return survival

    def observe(
        self,
        slots: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
        bins: np.ndarray | None = None,
    ) -> None:
        """Learn what became of the drafts of some rows.

        Args:
            verified, accepted: ``[rows]``, drafts looked at and kept. The first that is not kept
                was rejected; those behind it say nothing.
            bins: of the same drafts, as given to ``of``.
        """
        tried = verified > 0
        if not tried.any():
            return
        # Of those not tried, too: who was found hopeless long ago deserves to be tried again.
        self._by_request[:, slots] *= REQUEST_KEPT
        slots, verified, accepted = slots[tried], verified[tried], accepted[tried]
        bins = None if bins is None else bins[tried]
        places = np.arange(self.num_drafts)
        is_kept = places < accepted[:, None]
        is_rejected = (places == accepted[:, None]) & (accepted < verified)[:, None]
        request, by_bin = self._requests(slots), self._bins(bins)
        hazards = np.minimum(self._position * request * by_bin, HOPELESS)
        # A kept draft lived through all of its interval, a rejected one through as much as an
        # exponential clock with this hazard does on average before it rings.
        lived = np.where(is_rejected, 1 / hazards - 1 / np.expm1(hazards), is_kept)
        fading = SHARED_KEPT ** len(slots)
        self._by_request[:, slots] += np.stack(
            [is_rejected.sum(axis=1), (lived * self._position * by_bin).sum(axis=1)]
        )
        self._by_position = self._by_position * fading + np.stack(
            [is_rejected.sum(axis=0), (lived * request * by_bin).sum(axis=0)]
        )
        if bins is not None:
            weights = (is_rejected, lived * self._position * request)
            self._by_bin = self._by_bin * fading + np.stack(
                [np.bincount(bins.ravel(), each.ravel(), minlength=NUM_BINS) for each in weights]
            )
        self._position = self._position_rates()

    def _position_rates(self) -> np.ndarray:
        """``[N]``; of one rarely tried, nearly that of the position before it."""
        expected, rates = float(FIRST_GUESS), []
        for rejections, exposure in self._by_position.T.tolist():
            expected = (rejections + POSITION_STRENGTH) / (exposure + POSITION_STRENGTH / expected)
            rates.append(expected)
        return np.clip(rates, *HAZARDS)

    def _requests(self, slots: np.ndarray) -> np.ndarray:
        """``[rows, 1]``."""
        rejections, exposure = self._by_request[:, slots] + REQUEST_STRENGTH
        rates: np.ndarray = (rejections / exposure)[:, None]
        return rates

    def _bins(self, bins: np.ndarray | None) -> np.ndarray:
        """``[rows, N]``, or that of all drafts so far where nothing is known of these."""
        if bins is None:
            rejections, exposure = self._by_bin.sum(axis=1) + BIN_STRENGTH
            return np.full((1, 1), rejections / exposure)
        rejections, exposure = self._by_bin + BIN_STRENGTH
        rates: np.ndarray = (rejections / exposure)[bins]
        return rates


def bins_of(confidence: np.ndarray) -> np.ndarray:
    """The bin of each of the drafter's probabilities; the same shape, int."""
    bins: np.ndarray = np.searchsorted(BIN_EDGES, confidence, side="right")
    return bins
