"""``dllm plan``: what a pool of draft workers gains a pool of targets, from measured times.

Widths K (drafts a request and step) are compared by

    E    tokens a request and step: 1 + the sum of survival[0..K-1]
    T    milliseconds of a step: verification + round trip + drafting, with the waiting for drafts
         that the worker makes for other targets (``cycle``)

One target engine with B requests at once makes 1000 B E / T tokens a second. Survival of place i is
the share of verified drafts at that place that were kept, so that all drafts before were kept, too.
"""

import argparse
import http.client
import re
import tomllib
import urllib.request
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from dllm.settings.command import OK, CommandError

EXAMPLE = """\
# Times in ms, as measured. Prices an hour, in one currency. `dllm plan THIS_FILE`
round_trip_ms = 0.5

[targets]
engines = 1
requests = 8                # at once, in each engine
price = 8.0                 # of one engine
[targets.step]              # ms[i][j]: requests[i] with drafts[j] drafts each
requests = [1, 8]
drafts = [0, 8]
ms = [[14.0, 14.6], [15.0, 17.0]]

[drafts]
workers = 1
price = 1.2                 # of one worker
is_block = false            # true: all drafts come out of one step, as of a diffusion model
survival = [0.80, 0.66, 0.55, 0.46, 0.39, 0.33, 0.28, 0.24]  # of each place
[drafts.step]               # one token of each request, or one block
requests = [1, 8]
ms = [2.0, 2.2]
"""

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
    """

    engines: Count
    requests: Count
    step: Grid
    price: Number = 0.0

    def __post_init__(self) -> None:
        if self.step.drafts[0] != 0:
            raise ValueError(f"step.drafts = {self.step.drafts}; allowed: numbers from 0 on")


class Drafts(Struct, frozen=True, forbid_unknown_fields=True):
    """The pool that drafts.

    Attributes:
        workers: how many; the requests of every target are spread evenly over them.
        step: time by requests, of one token each, or of a whole block each (``is_block``).
        survival: ``[N]``, of each place; not increasing.
        is_block: all drafts of a request come out of one step, as of a diffusion model.
        price: of one worker, an hour.
    """

    workers: Count
    step: Grid
    survival: Annotated[tuple[Share, ...], Meta(min_length=1)]
    is_block: bool = False
    price: Number = 0.0

    def __post_init__(self) -> None:
        places = self.survival
        if list(places) != sorted(places, reverse=True):
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
        target_busy, drafts_busy, network_busy: shares of the time; with several targets, drafts may
            be made while others verify.
    """

    width: int
    tokens: float
    step_ms: float
    tokens_per_s: float
    speedup: float
    price: float
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
        tokens = 1.0 + sum(drafts.survival[:width])
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

    Each request belongs to one worker, so all workers have the same load. One of them is simulated
    with its targets, step by step. Its engine batches: a request that arrives in the middle of a
    step joins the next one.
    """
    num_targets, num_steps = targets.engines, 1 if drafts.is_block else width
    share = max(1.0, targets.requests / drafts.workers)  # requests of one target at this worker
    away_ms = verify_ms + round_trip_ms  # from an answer to the same target's next ask
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


# --- the command ----------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Print, from measured times, what each number of drafts gives, and the best one."""
    parser = argparse.ArgumentParser(prog="dllm plan", description=main.__doc__)
    parser.add_argument("plan", nargs="?", type=Path, help="TOML file; --example prints one")
    parser.add_argument("--example", action="store_true", help="print a file to start from")
    parser.add_argument(
        "--metrics",
        metavar="URL",
        help="take survival from a running target, as http://127.0.0.1:8000/metrics",
    )
    parser.add_argument(
        "--best", choices=("speed", "price"), default="speed", help="what counts (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.example:
        print(EXAMPLE, end="")
        return OK
    if options.plan is None:
        parser.error("a plan is needed; `dllm plan --example` prints one")
    survival = None if options.metrics is None else _survival_of(_fetch(options.metrics))
    try:
        given = read_plan(options.plan.read_text(), survival)
        rows = plan(given.targets, given.drafts, given.round_trip_ms)
    except (OSError, ValueError) as error:
        raise CommandError(f"{options.plan}: {error}") from None
    best = min(rows, key=lambda row: row.price if options.best == "price" else -row.tokens_per_s)
    print("\n".join(report(rows, best)))
    return OK


def read_plan(text: str, survival: tuple[float, ...] | None = None) -> Plan:
    """The plan of a TOML file; ``survival`` replaces the file's.

    Raises:
        ValueError: names the field, and what is allowed.
    """
    given = tomllib.loads(text)
    if survival is not None and isinstance(given.get("drafts"), dict):
        given["drafts"]["survival"] = survival
    read: Plan = msgspec.convert(given, Plan)
    return read


def _fetch(url: str) -> str:
    """The text of a server's metrics."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--metrics {url}; allowed: http://HOST:PORT/metrics.")
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"--metrics {url}: {error}") from None


def _survival_of(metrics: str) -> tuple[float, ...]:
    """Accepted by verified drafts of each position, as far as there are any.

    Raises:
        CommandError: the server has verified no drafts.
    """

    def by_position(name: str) -> dict[int, float]:
        counts: dict[int, float] = {}
        for labels, value in re.findall(rf"^{name}{{(.*?)}} (\S+)$", metrics, re.M):
            position = int(re.search(r'position="(\d+)"', labels).group(1))  # type: ignore[union-attr]
            counts[position] = counts.get(position, 0.0) + float(value)
        return counts

    accepted = by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    verified = by_position("dllm:verified_tokens_per_pos_total")
    places = [
        accepted.get(place, 0.0) / count for place, count in sorted(verified.items()) if count
    ]
    if not places:
        raise CommandError("this server has verified no drafts.")
    # A policy verifies late places where it expects more, so their share may rise by a little.
    return tuple(np.minimum.accumulate(places).tolist())


def report(rows: Sequence[Row], best: Row) -> list[str]:
    """The lines of the table, the best width marked, and what to look at next."""
    lines = ["  drafts  tokens/step  ms/step  tokens/s  speedup  price/M  target drafts"]
    for row in rows:
        lines.append(
            f"{'*' if row is best else ' '} {row.width:6}  {row.tokens:11.2f}  {row.step_ms:7.2f}  "
            f"{row.tokens_per_s:8.0f}  {row.speedup:6.2f}x  {row.price:7.3f}  "
            f"{row.target_busy:5.0%} {row.drafts_busy:6.0%}"
        )
    if best.width == 0:
        return [*lines, "Plain decoding is best: drafts cost more than they give."]
    least = {
        "target": "a faster target gains most",
        "drafts": "faster drafts gain most: more workers, or a smaller draft model",
        "network": "a shorter round trip gains most",
    }[best.bottleneck]
    return [*lines, f"Best: {best.width} drafts, {best.speedup:.2f}x. Bottleneck: {least}."]
