"""Where the wall time of each engine step went; every instant is counted once.

A step lasts from the start of one ``schedule()`` to the start of the next, so that nothing between
two steps is lost. An instant of it belongs to

    the part of the GPU kernel that runs, which is that of the host code that launched it;
    else, the innermost part that the host code is in (where a GPU is at work in this trace, host
        code of forward, head and sampler only launches kernels, and does not count);
    else, a gap;

so the parts of a step and its gaps add up to its wall time. The ranges are those that
`bench.step_parts` noted, or those in a trace that torch.profiler exported, gzipped or not.
"""

from __future__ import annotations

import gzip
import itertools
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.step_parts import BATCH, GROUPS, IDLE, PREFIX, SAMPLER, STEP, Range

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class Piece(NamedTuple):
    """A stretch of time in which one part and no other ran; pieces do not overlap."""

    part: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Step:
    """One engine step.

    Attributes:
        wall_ms: from its ``schedule()`` to the next.
        parts_ms: by component; together, ``wall_ms``.
        num_reqs, num_canvas_rows, num_rows: of its batch; 0 where no model ran.
    """

    wall_ms: float
    parts_ms: dict[str, float]
    num_reqs: int = 0
    num_canvas_rows: int = 0
    num_rows: int = 0

    @property
    def is_denoise_only(self) -> bool:
        """Every row belongs to a canvas: no prompt, no block to commit."""
        return 0 < self.num_canvas_rows == self.num_rows


@dataclass
class Trace:
    """Ranges of host code, and kernels of a GPU."""

    ranges: list[Range] = field(default_factory=list)
    kernels: list[tuple[Range, object]] = field(default_factory=list)  # with correlation
    launches: dict[object, float] = field(default_factory=dict)  # correlation -> us

    @classmethod
    def read(cls, path: Path) -> Trace:
        """What torch.profiler exported while parts were named.

        Raises:
            ValueError: there is no engine step in it.
        """
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        trace = cls()
        for event in events:
            if event.get("ph") == "X":
                trace._add(event)
        if not any(one.name == STEP for one in trace.ranges):
            raise ValueError(
                f"{path}: no engine step in it; name the parts before the trace is taken "
                "(bench.step_parts.name_parts)."
            )
        return trace

    def _add(self, event: dict[str, Any]) -> None:
        name, start = event["name"], float(event["ts"])
        category, arguments = event.get("cat"), event.get("args", {})
        end = start + float(event.get("dur", 0))
        if category == "user_annotation" and name.startswith(PREFIX):
            self.ranges.append(Range(name.removeprefix(PREFIX), start, end))
        elif category in GPU_CATEGORIES:
            self.kernels.append((Range(name, start, end), arguments.get("correlation")))
        elif category in LAUNCH_CATEGORIES and "correlation" in arguments:
            self.launches[arguments["correlation"]] = start

    def steps(self) -> list[Step]:
        """Every step but the last, which has no successor to end it."""
        batches = [one for one in _by_start(self.ranges) if one.name.startswith(BATCH)]
        starts = sorted(one.start_us for one in self.ranges if one.name == STEP)
        host = innermost(one for one in self.ranges if one.name in GROUPS)
        pieces = self._on_device(host) if self.kernels else host
        return _per_step(pieces, starts, batches)

    def num_canvas_rows(self) -> int:
        """Canvas rows of all steps."""
        return sum(int(one.name.split()[2]) for one in self.ranges if one.name.startswith(BATCH))

    def span_ms(self) -> float:
        """From the first step that ran the model to the end of the last sampling.

        The engine also takes steps that only tidy up, before the first request and after the last
        answer.
        """
        ran = min(one.start_us for one in self.ranges if one.name.startswith(BATCH))
        begins = [one.start_us for one in self.ranges if one.name == STEP and one.start_us < ran]
        ends = [one.end_us for one in self.ranges if one.name == SAMPLER]
        return (max(ends) - max(begins)) / 1e3

    def _on_device(self, host: Sequence[Piece]) -> list[Piece]:
        """Pieces in which kernels come before the host, and launching is no work."""
        begins = [piece.start_us for piece in host]
        kernels = []
        for kernel, correlation in self.kernels:
            launched = self.launches.get(correlation, kernel.start_us)
            index = bisect_right(begins, launched) - 1
            is_inside = index >= 0 and launched < host[index].end_us
            part = host[index].part if is_inside else IDLE
            kernels.append(kernel._replace(name=part))
        working = [piece for piece in host if GROUPS[piece.part] == "engine"]
        return overlay(innermost(kernels), working)


def _by_start(ranges: Iterable[Range]) -> list[Range]:
    return sorted(ranges, key=lambda one: (one.start_us, -one.end_us))


def innermost(ranges: Iterable[Range]) -> list[Piece]:
    """Of ranges that overlap, the one that started last has the instant."""
    pieces: list[Piece] = []
    open_ranges: list[Range] = []
    now = float("-inf")

    def advance(until: float) -> None:
        nonlocal now
        while open_ranges and now < until:
            current = open_ranges[-1]
            if current.end_us <= now:
                open_ranges.pop()
                continue
            end = min(current.end_us, until)
            pieces.append(Piece(current.name, now, end))
            now = end
        now = max(now, until)

    for one in _by_start(ranges):
        advance(one.start_us)
        open_ranges.append(one)
    advance(float("inf"))
    return pieces


def overlay(upper: Sequence[Piece], lower: Sequence[Piece]) -> list[Piece]:
    """All of ``upper``, and of ``lower`` what it leaves free; both without overlaps, in order."""
    free: list[Piece] = []
    index = 0
    for part, begin, end in lower:
        start = begin
        while index < len(upper) and upper[index].end_us <= start:
            index += 1
        at = index
        while at < len(upper) and upper[at].start_us < end:
            if upper[at].start_us > start:
                free.append(Piece(part, start, upper[at].start_us))
            start = max(start, upper[at].end_us)
            at += 1
        if start < end:
            free.append(Piece(part, start, end))
    return sorted([*upper, *free], key=lambda piece: piece.start_us)


def _per_step(
    pieces: Sequence[Piece], starts: Sequence[float], batches: Sequence[Range]
) -> list[Step]:
    """Divide the pieces among the steps that they fall into; what is left of a step is a gap."""
    parts: list[dict[str, float]] = [defaultdict(float) for _ in starts]
    for part, start, end in pieces:
        index = bisect_right(starts, start) - 1
        while start < end and index < len(starts) - 1:
            until = min(end, starts[index + 1])
            if index >= 0:
                parts[index][part] += until - start
            start, index = until, index + 1
    sizes = [(0, 0, 0)] * len(starts)
    for batch in batches:
        index = bisect_right(starts, batch.start_us) - 1
        if index >= 0:
            reqs, canvas_rows, rows = map(int, batch.name.split()[1:])
            sizes[index] = (reqs, canvas_rows, rows)
    steps = []
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        wall = end - start
        taken = parts[index]
        taken[IDLE] += wall - sum(taken.values())
        milliseconds = {part: taken.get(part, 0.0) / 1e3 for part in GROUPS}
        steps.append(Step(wall / 1e3, milliseconds, *sizes[index]))
    return steps
