"""Unread frames of watched requests, and how they get between the lines of a stream.

    route      opens a CanvasFeed for the HTTP request (``http_request.current``)
    engine     requests that start meanwhile write to this feed
    messages   ``deliver`` takes frames out before vLLM's output processor sees them
    stream     ``interleaved`` writes them between vLLM's own lines, which stay as they are

A client that reads slowly misses frames; nothing else waits for it.
"""

import asyncio
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from dllm.api.events import TRACE_FIELD, TraceWriter, append_trace, block_trace
from dllm.engine.channels import frame_in
from dllm.engine.frames import Frame, frame_of

# Of more unread frames of unfinished canvases the oldest are dropped. A frame has 3 KB for 256
# positions.
MAX_UNREAD = 64


class Pace:
    """``rate`` frames a second on average, and as many at once: a short answer is seen whole."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._last = clock()
        self._left = float(rate)

    def allows(self, is_final: bool) -> bool:
        """Whether one more frame may be sent; the last one of a canvas always may, and counts."""
        now = self._clock()
        self._left = min(self._left + (now - self._last) * self._rate, self._rate)
        self._last = now
        if self._left < 1 and not is_final:
            return False
        self._left -= 1
        return True


class CanvasFeed:
    """The unread frames of a stream; ``num_choices``: answers to each prompt."""

    def __init__(self, pace: Pace, num_choices: int) -> None:
        self.request_id = ""  # as the stream's client sees it; empty before a request has started
        self.traces: dict[int, dict[str, Any]] = {}  # that have come, by the number of the answer
        self.first_choice: dict[str, int] = {}  # by the engine's id: one for each prompt
        self.bell = asyncio.Event()  # set while something is unread
        self.is_open = True
        self._num_choices = num_choices
        self._pace = pace
        self._unread: list[tuple[int, Frame]] = []

    def add_request(self, request_id: str) -> None:
        self.first_choice[request_id] = len(self.first_choice) * self._num_choices

    def put(self, choice: int, frame: Frame) -> None:
        """Add a frame of the answer number ``choice``; never waits."""
        if self._pace.allows(frame.is_final):
            drafts = [n for n, (_, unread) in enumerate(self._unread) if not unread.is_final]
            if len(drafts) >= MAX_UNREAD:
                del self._unread[drafts[0]]
            self._unread.append((choice, frame))
            self.bell.set()

    def take(self) -> list[tuple[int, Frame]]:
        """All unread frames, oldest first."""
        unread, self._unread = self._unread, []
        self.bell.clear()
        return unread


class Watchers:
    """The feeds of an engine client; vLLM's output ``processor`` knows whose a request is."""

    def __init__(self, processor: Any, limit: int) -> None:
        self._processor = processor
        self._limit = limit
        self._streams: weakref.WeakSet[CanvasFeed] = weakref.WeakSet()
        self._numbers = itertools.count()  # of requests that are watched
        # By the id of ``start``.
        self._feeds: weakref.WeakValueDictionary[str, CanvasFeed] = weakref.WeakValueDictionary()

    def open(self, rate: int, shows_canvases: bool, num_choices: int) -> CanvasFeed | None:
        """A new feed, for one answer; None if there are too many that show canvases."""
        feed = CanvasFeed(Pace(rate), num_choices)
        if shows_canvases:
            if sum(each.is_open for each in self._streams) >= self._limit:
                return None
            self._streams.add(feed)
        return feed

    def start(self, request_id: str, feed: CanvasFeed) -> str:
        """The request's id for the engine, which no other watched request has.

        Several clients may send the same one (``X-Request-Id``), and none may see the canvases of
        another.
        """
        own = f"{request_id}-{next(self._numbers)}"
        self._feeds[own] = feed
        feed.add_request(own)
        return own

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        for state, frame in frames_taken(self._processor, outputs.outputs):
            feed = self._feeds.get(state.external_req_id)
            if feed is not None:
                choice = feed.first_choice[state.external_req_id] + state.request_index
                feed.put(choice, frame)
                if frame.trace is not None:
                    feed.traces[choice] = vars(state)[TRACE_FIELD]


def frames_taken(processor: Any, arrived: list[EngineCoreOutput]) -> Iterator[tuple[Any, Frame]]:
    """Take the frames out of what arrived: (vLLM's state of the request, the frame).

    Traces are kept in the state, for the request's output.
    """
    first = len(arrived)
    while first and frame_in(arrived[first - 1]) is not None:  # they are the last ones
        first -= 1
    frames = arrived[first:]
    del arrived[first:]
    for output in frames:
        state = processor.request_states.get(output.request_id)
        if state is None:
            continue
        frame = frame_of(output)
        assert frame is not None
        if (block := block_trace(frame)) is not None:
            append_trace(vars(state).setdefault(TRACE_FIELD, {}), block)
        yield state, frame


def has_frames(arrived: list[EngineCoreOutput]) -> bool:
    """Whether outputs of a step hold frames, which are its last ones."""
    return bool(arrived) and frame_in(arrived[-1]) is not None


async def interleaved(
    lines: AsyncGenerator[str, None], feed: CanvasFeed, writer: TraceWriter
) -> AsyncIterator[str]:
    """vLLM's lines, and in front of each the frames that have come until then."""
    line = asyncio.ensure_future(anext(lines))
    bell = asyncio.ensure_future(feed.bell.wait())
    try:
        while True:
            await asyncio.wait({line, bell}, return_when=asyncio.FIRST_COMPLETED)
            for choice, frame in feed.take():
                yield writer.frame(choice, frame)
            if bell.done():
                bell = asyncio.ensure_future(feed.bell.wait())
            if line.done():
                try:
                    text = line.result()
                except StopAsyncIteration:
                    return
                yield writer.own(text)
                line = asyncio.ensure_future(anext(lines))
    finally:
        feed.is_open = False
        for task in (line, bell):
            task.cancel()
        await asyncio.gather(line, bell, return_exceptions=True)
        await lines.aclose()  # aborts the request if it has not ended
