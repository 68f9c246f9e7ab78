"""What a pool of draft workers gains a pool of targets, from measured times and acceptance.

Widths K (drafts a request and step) are compared by

    E    tokens a request and step: 1 + the sum of survival[0..K-1]
    T    milliseconds of a step: verification + round trip + drafting, with the waiting for drafts
         that the worker makes for other targets (``cycle``)

One target engine with B requests at once makes 1000 B E / T tokens a second. Survival of place i is
the share of verified drafts at that place that were kept, so that all drafts before were kept, too.
"""

from collections import deque
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

WARM_UP, COUNTED = 50, 400  # steps of each target in a simulation of shared workers
Count = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(ge=0, le=1e6)]
Time = Annotated[float, Meta(gt=0, le=1e6)]  # milliseconds
Share = Annotated[float, Meta(ge=0, le=1)]


class Grid(Struct, frozen=True, forbid_unknown_fields=True):
    """Measured milliseconds of a step.

    Attributes:
        requests: ``[R]``, requests in the step, increasing.
        ms: ``[R]``, or ``[R, D]`` where the width matters.
        drafts: ``[D]``, drafts of each request, increasing.
    """

    requests: Annotated[tuple[Time, ...], Meta(min_length=1)]
    ms: tuple[Time | tuple[Time, ...], ...]
    drafts: Annotated[tuple[Number, ...], Meta(min_length=1)] = (0.0,)

    def __post_init__(self) -> None:
        rows = tuple(each if isinstance(each, tuple) else (each,) for each in self.ms)
        if len(rows) != len(self.requests) or any(len(row) != len(self.drafts) for row in rows):
            raise ValueError(f"ms; allowed: {len(self.requests)} rows of {len(self.drafts)} times")
        for name in ("requests", "drafts"):
            axis = getattr(self, name)
            if list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} = {axis}; allowed: numbers that increase")
        force_setattr(self, "ms", rows)

    def at(self, requests: float, drafts: float = 0) -> float:
        """Interpolated linearly in both. Below the smallest batch its time counts.

        Raises:
            ValueError: beyond what was measured.
        """
        if requests > self.requests[-1] or drafts > self.drafts[-1]:
            raise ValueError(
                f"no time was measured of {requests:g} requests with {drafts:g} drafts; the "
                f"largest are {self.requests[-1]:g} and {self.drafts[-1]:g}."
            )
        by_width = [
            np.interp(requests, self.requests, column) for column in zip(*self.ms, strict=True)
        ]  # type: ignore[arg-type]
        return float(np.interp(drafts, self.drafts, by_width))


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """The pool that verifies.

    Attributes:
        engines: how many.
        requests: at once, in each engine.
        step: time of a step by requests and drafts of each, plain decoding included.
        price: of one engine, an hour, in any currency.
        kv_bytes: of one token in the KV cache, all layers.
    """

    engines: Count
    requests: Count
    step: Grid
    price: Number = 0.0
    kv_bytes: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.step.drafts[0] != 0:
            raise ValueError(f"step.drafts = {self.step.drafts}; allowed: numbers from 0 on")


class Drafts(Struct, frozen=True, forbid_unknown_fields=True):
    """The pool that drafts.

    Attributes:
        workers: how many; the requests of every target are spread evenly over them.
        step: time by requests, of one token each, or of a whole block each (``is_block``).
        survival: ``[N]``, of each place; not increasing.
        acceptance, places: in place of it: each draft is kept with this probability, given those
            before it; N.
        is_block: all drafts of a request come out of one step, as of a diffusion model.
        ahead: the worker drafts on while the target verifies (`dllm draft-worker --ahead`).
        price: of one worker, an hour.
    """

    workers: Count
    step: Grid
    survival: tuple[Share, ...] = ()
    is_block: bool = False
    ahead: bool = False
    price: Number = 0.0
    acceptance: Share | None = None
    places: Annotated[int, Meta(ge=1, le=64)] | None = None

    def __post_init__(self) -> None:
        if not self.survival and self.acceptance is not None:
            if self.places is None:
                raise ValueError("places is missing; it belongs to acceptance")
            force_setattr(self, "survival", constant(self.acceptance, self.places))
        places = self.survival
        is_falling = all(a >= b for a, b in zip((1.0, *places), (*places, 0.0), strict=True))
        if not places or not is_falling:
            raise ValueError(f"survival = {places}; allowed: numbers from 1 down to 0")


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """What `dllm plan` reads."""

    round_trip_ms: Number
    targets: Targets
    drafts: Drafts


class Row(NamedTuple):
    """One width, and what it gives.

    Attributes:
        width: drafts of each request.
        tokens: of a request and step.
        step_ms: from one verification to the next.
        tokens_per_s: of all engines.
        speedup: over width 0.
        price: of a million tokens.
        kv_bytes: in each engine, for drafts in verification.
        target_busy, drafts_busy, network_busy: shares of the time; with several targets, drafts may
            be made while others verify.
    """

    width: int
    tokens: float
    step_ms: float
    tokens_per_s: float
    speedup: float
    price: float
    kv_bytes: int
    target_busy: float
    drafts_busy: float
    network_busy: float

    @property
    def bottleneck(self) -> str:
        """What takes the largest share of the time."""
        shares = {
            "target": self.target_busy,
            "drafts": self.drafts_busy,
            "network": self.network_busy,
        }
        return max(shares, key=lambda name: shares[name])


def expected_tokens(survival: Sequence[float], width: int) -> float:
    """Tokens of a request and step when ``width`` drafts are verified."""
    return 1.0 + float(np.sum(survival[:width]))


def constant(acceptance: float, width: int) -> tuple[float, ...]:
    """Survival when each draft is kept with this probability, given those before it."""
    return tuple(acceptance ** (place + 1) for place in range(width))


def plan(targets: Targets, drafts: Drafts, round_trip_ms: float) -> list[Row]:
    """All widths from 0 to N.

    Raises:
        ValueError: a batch or width for which no time was given, or what cannot be planned.
    """
    plain_ms = targets.step.at(targets.requests, 0)
    rows: list[Row] = []
    for width in range(len(drafts.survival) + 1):
        verify_ms = targets.step.at(targets.requests, width)
        step_ms, busy = plain_ms, 0.0
        if width:
            step_ms, busy = cycle(targets, drafts, width, verify_ms, round_trip_ms)
        tokens = expected_tokens(drafts.survival, width)
        rate = 1e3 * targets.engines * targets.requests * tokens / step_ms
        price = targets.engines * targets.price + (drafts.workers * drafts.price if width else 0)
        rows.append(
            Row(
                width,
                tokens,
                step_ms,
                rate,
                tokens * plain_ms / step_ms,
                price / (rate * 3600) * 1e6,
                targets.requests * width * targets.kv_bytes,
                verify_ms / step_ms,
                busy,
                round_trip_ms / step_ms if width else 0.0,
            )
        )
    return rows


def cycle(
    targets: Targets, drafts: Drafts, width: int, verify_ms: float, round_trip_ms: float
) -> tuple[float, float]:
    """Milliseconds from one verification to the next, and the share in which a worker drafts.

    Each request belongs to one worker, so all workers have the same load; one is looked at.
    """
    share = max(1.0, targets.requests / drafts.workers)
    if drafts.ahead:
        if targets.engines > 1 or drafts.is_block:
            raise ValueError("ahead; allowed: one target engine, and a draft model of tokens.")
        return _ahead(targets, drafts, width, verify_ms, round_trip_ms)
    return _shared_worker(
        targets.engines, drafts, share, 1 if drafts.is_block else width, verify_ms + round_trip_ms
    )


def _ahead(
    targets: Targets, drafts: Drafts, width: int, verify_ms: float, round_trip_ms: float
) -> tuple[float, float]:
    """With running ahead: nobody waits if every request's guess was right.

    A guess is right if all drafts were kept and the token behind them is the one that was guessed:
    one more place of survival. The drafts behind it take ``width + 1`` steps of the worker, which
    run while the messages travel and the target verifies.
    """
    each_ms = drafts.step.at(max(1.0, targets.requests / drafts.workers))
    survival = (*drafts.survival, drafts.survival[-1])
    hit = survival[width] ** targets.requests
    free_ms = verify_ms + round_trip_ms
    late_ms = max(0.0, (width + 1) * each_ms - free_ms)
    wait_ms = hit * min(late_ms, width * each_ms) + (1 - hit) * width * each_ms
    step_ms = free_ms + wait_ms
    return step_ms, min(1.0, (wait_ms + min(free_ms, (width + 1) * each_ms)) / step_ms)


def _shared_worker(
    num_targets: int, drafts: Drafts, share: float, num_steps: int, away_ms: float
) -> tuple[float, float]:
    """Simulate one worker and its targets, step by step.

    The worker's engine batches: a request that arrives in the middle of a step joins the next one.

    Args:
        share: requests of one target at this worker.
        num_steps: engine steps that the drafts of a request take.
        away_ms: from the worker's answer to the same target's next ask.
    """
    # (arrives at, target); all targets start spread over the time that one is away.
    arrivals = deque((away_ms * target / num_targets, target) for target in range(num_targets))
    active: dict[int, int] = {}  # target -> steps left
    now = busy = began = 0.0
    answered = 0
    first, last = WARM_UP * num_targets, (WARM_UP + COUNTED) * num_targets
    while answered < last:
        if not active:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            active[arrivals.popleft()[1]] = num_steps
        step_ms = drafts.step.at(share * len(active))
        now, busy = now + step_ms, busy + step_ms
        for target in [each for each, left in active.items() if left == 1]:
            del active[target]
            arrivals.append((now + away_ms, target))  # away_ms is the same for all: in order
            answered += 1
            if answered == first:
                began, busy = now, 0.0
        for target in active:
            # Those that were answered are gone.
            active[target] -= 1
    elapsed = now - began
    return elapsed * num_targets / (answered - first), min(1.0, busy / elapsed)  # rounding
