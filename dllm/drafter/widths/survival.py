"""Estimates how likely a draft survives verification, from what happened to earlier drafts.

A draft survives if it is kept and does not end the answer (``VerifiedStep.accepted``), and all
drafts before it do. Minus the logarithm of the acceptance probability at a place is called a
hazard; hazards add up. Each is a product of three rates:

    survival(request, j) = exp(-sum over i <= j of position[i] * request * confidence[bin(i)])

    position    rejections at this place of the draft block, over all requests
    request     how this request differs from the average (1 = average)
    confidence  how drafts with a similar probability by the drafter differ from the average

A rate is (rejections + k) / (exposure + k / expected), the mean of a Gamma distribution. Exposure
is the number of rejections that the other two rates predict; k is the weight of the expected rate.
All counts fade with time.

This is Cox's model of proportional hazards. A rejection at one place changes the request's estimate
at all places, so a few steps tell an easy request from a hard one. A new request starts as average.
"""

import math

import numpy as np

FIRST_GUESS = -math.log(0.8)  # hazard of a position before any draft was verified
# k of the formula: the expected rate counts as much as so many rejections.
POSITION_STRENGTH, REQUEST_STRENGTH, BIN_STRENGTH = 1.0, 1.0, 4.0
# Fading: counts shared by all requests are multiplied by the first number in each step, because the
# questions of a server change. A request's own counts are multiplied by the second in each step in
# which any row of the batch was verified.
SHARED_KEPT, REQUEST_KEPT = 1 - 1 / 64, 0.95
# Rejections at a place do not fade below this while nothing is verified: otherwise the next drafts
# would be expected to be nearly as good as before any was verified.
KEPT_UNVERIFIED = 8.0
HAZARD_RANGE = -math.log(0.998), -math.log(0.002)  # of a position: acceptance 0.998 to 0.002
MAX_HAZARD = 50.0  # exp(-50) is 0 for this purpose; keeps expm1 below finite
# Edges of the bins of the drafter's probability; narrow near 1, where hazards differ most.
BIN_EDGES = np.array([0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99, 0.997])
NUM_BINS = len(BIN_EDGES) + 1


class Survival:
    """Survival estimates for every request slot; ``reset`` a slot when another request takes it.

    Args:
        trusts_probability: expect drafts to survive as their probability says, before any was
            verified, and again after many steps in which none was. Otherwise all are expected to be
            alike, and what was learned is kept: for drafts that are tried now and then in any case.
    """

    def __init__(self, num_slots: int, num_drafts: int, trusts_probability: bool = False) -> None:
        self.num_drafts = num_drafts
        self._kept_unverified = 0.0 if trusts_probability else KEPT_UNVERIFIED
        middles = (np.append(0.0, BIN_EDGES) + np.append(BIN_EDGES, 1.0)) / 2
        self._expected = -np.log(middles) / FIRST_GUESS if trusts_probability else np.ones(NUM_BINS)
        # Each holds two rows: rejections, exposure.
        self._by_position = np.zeros((2, num_drafts))
        self._by_request = np.zeros((2, num_slots))
        self._by_bin = np.zeros((2, NUM_BINS))
        self._position = self._position_rates()

    def reset(self, slots: np.ndarray) -> None:
        self._by_request[:, slots] = 0.0

    def exposure(self, slots: np.ndarray) -> np.ndarray:
        """``[rows]``, in rejections of an average request; earlier steps count less."""
        return self._by_request[1, slots]

    def of(self, slots: np.ndarray, bins: np.ndarray | None = None) -> np.ndarray:
        """``[rows, N]``: the probability that all drafts up to each place are kept.

        ``bins``: ``[rows, N]``, by ``bins_of``; None before drafting, when they are unknown.
        """
        hazards = self._position * self._request_rates(slots) * self._bin_rates(bins)  # [rows, N]
        survival: np.ndarray = np.exp(-hazards.cumsum(axis=1))
        return survival

    def observe(
        self,
        slots: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
        bins: np.ndarray | None = None,
    ) -> None:
        """Of a step: ``verified`` and ``accepted``, ``[rows]``, and ``bins`` as given to ``of``.

        If fewer are accepted, the next one was rejected; the drafts behind it tell nothing.
        """
        tried = verified > 0
        has_tried = bool(tried.any())
        if not has_tried and self._by_position[0].max() <= self._kept_unverified:
            return
        self._by_position *= SHARED_KEPT
        self._by_bin *= SHARED_KEPT
        if not has_tried:
            self._position = self._position_rates()
            return
        # Also for rows of width 0: otherwise a bad estimate would last for ever, because a request
        # that is never verified gives no new counts.
        self._by_request[:, slots] *= REQUEST_KEPT
        if not tried.all():
            slots, verified, accepted = slots[tried], verified[tried], accepted[tried]
            bins = None if bins is None else bins[tried]
        places = np.arange(self.num_drafts)
        is_kept = places < accepted[:, None]  # [rows, N]
        is_rejected = places == np.where(accepted < verified, accepted, -1)[:, None]
        request, by_bin = self._request_rates(slots), self._bin_rates(bins)
        hazards = np.minimum(self._position * request * by_bin, MAX_HAZARD)
        # Fraction of its place that a draft survived. A kept one: 1. A rejected one: the mean of an
        # exponential time with this hazard, given that it is below 1. Others: 0.
        survived = np.where(is_rejected, 1 / hazards - 1 / np.expm1(hazards), is_kept)
        predicted = survived * hazards  # rejections, by all three rates
        self._by_request[0, slots] += is_rejected.sum(axis=1)
        self._by_request[1, slots] += predicted.sum(axis=1) / request[:, 0]
        self._by_position[0] += is_rejected.sum(axis=0)
        self._by_position[1] += (predicted / self._position).sum(axis=0)
        if bins is not None:
            flat = bins.ravel()
            self._by_bin[0] += np.bincount(flat, is_rejected.ravel(), NUM_BINS)
            self._by_bin[1] += np.bincount(flat, (predicted / by_bin).ravel(), NUM_BINS)
        self._position = self._position_rates()

    def _position_rates(self) -> np.ndarray:
        """``[N]``. A place that was rarely verified gets nearly the rate of the place before it."""
        (least, most), expected, rates = HAZARD_RANGE, FIRST_GUESS, []
        for rejections, exposure in zip(*self._by_position.tolist(), strict=True):
            expected = (rejections + POSITION_STRENGTH) / (exposure + POSITION_STRENGTH / expected)
            rates.append(min(max(expected, least), most))
        return np.array(rates)

    def _request_rates(self, slots: np.ndarray) -> np.ndarray:
        """``[rows, 1]``; the expected rate is 1."""
        rejections, exposure = self._by_request[:, slots] + REQUEST_STRENGTH
        rates: np.ndarray = (rejections / exposure)[:, None]
        return rates

    def _bin_rates(self, bins: np.ndarray | None) -> np.ndarray:
        """``[rows, N]``, or without bins ``[1, 1]``, the rate of all drafts together."""
        if bins is None:
            rejections, exposure = self._by_bin.sum(axis=1) + BIN_STRENGTH
            return np.full((1, 1), rejections / exposure)
        rejections, exposure = self._by_bin
        strength = exposure + BIN_STRENGTH / self._expected
        rates: np.ndarray = ((rejections + BIN_STRENGTH) / strength)[bins]
        return rates


def bins_of(confidence: np.ndarray) -> np.ndarray:
    """The index of the bin of each of the drafter's probabilities; int, of the same shape."""
    bins: np.ndarray = np.searchsorted(BIN_EDGES, confidence, side="right")
    return bins
