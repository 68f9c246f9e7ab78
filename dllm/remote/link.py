"""A target's link to one draft worker, and in which state it is.

    DOWN        nobody is connected; the next attempt is made soon
    CONNECTING  an attempt is made; the worker has said nothing
    UP          the worker has greeted this target: it is asked, and waited for
    LATE        it has not answered within the deadline, and is not asked until it does

    DOWN -> CONNECTING -> UP <-> LATE, and back to DOWN from each

A connection is not UP when only this side has finished: under TLS 1.3 a worker looks at the
target's certificate when the target is done. The worker's greeting says that it has let it in.
"""

import logging
import time
from collections.abc import Callable
from enum import Enum

from dllm.engine.metrics import Counts
from dllm.remote.report import Report
from dllm.remote.stream import Stream
from dllm.remote.wire import DraftBatch, Reply, frame, read_reply

RECONNECT_S = 0.1  # between two attempts
CONNECT_WITHIN_S = 3.0  # the greeting included


class State(Enum):
    DOWN, CONNECTING, UP, LATE = range(4)


class Link:
    """One worker, as a target sees it: a connection that is made again whenever it breaks.

    ``dial`` begins one, and raises OSError if nobody listens. ``deadline_s``: to answer within.
    """

    def __init__(
        self,
        address: str,
        dial: Callable[[], Stream],
        deadline_s: float,
        counts: Counts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.address = address
        self.state = State.DOWN
        self.connection: Stream | None = None  # if the state is not DOWN
        # step: of the last batch that has a reply. num_ups: how often it came up; then the worker
        # knows no session.
        self.step = self.num_ups = 0
        self.asked_at: float | None = None  # when the oldest batch without an answer was sent
        self.over: list[int] = []  # sessions that have ended, which the worker has yet to be told
        self.is_foreign = False  # it has answered with tokens that the target does not have
        self._dial, self._deadline_s, self._clock = dial, deadline_s, clock
        self._counts = counts
        self._dialed_at = float("-inf")
        self._why = ""  # the last connection ended, or was not made
        self._report = Report(clock)

    @property
    def is_up(self) -> bool:
        """Whether the worker may know sessions."""
        return self.state in (State.UP, State.LATE)

    @property
    def is_out(self) -> bool:
        """Whether nobody asks it or waits for it."""
        return self.state is not State.UP

    @property
    def is_near(self) -> bool:
        """Whether the worker is connected, and on this machine."""
        return self.connection is not None and self.connection.is_near

    def ask(self, batch: DraftBatch) -> bool:
        """Send a batch; returns whether it is on its way."""
        if self.connection is None or not self.is_up or not self.connection.send(frame(batch)):
            return False
        self.count("asks")
        self.over = []
        if any(row.want for row in batch.rows):  # others get no reply
            self.step = batch.step
            self.asked_at = self._clock() if self.asked_at is None else self.asked_at
        return True

    def receive(self) -> list[Reply]:
        """Replies that are there. Takes note of a broken connection, and makes it again."""
        replies = self._read(self.connection)
        if replies and self.state is State.CONNECTING:
            self.state = State.UP
            self.num_ups += 1
            del replies[0]  # the greeting
        for reply in replies:
            self.count("replies")
            self.state = State.UP
            self.asked_at = None if reply.step >= self.step else self._clock()
        self._end_what_fails()
        if self.state is State.DOWN and self._clock() >= self._dialed_at + RECONNECT_S:
            self._connect()
        self._say()
        return replies

    def _read(self, connection: Stream | None) -> list[Reply]:
        try:
            return [] if connection is None else [read_reply(each) for each in connection.read()]
        except ValueError as error:
            assert connection is not None
            self.count("refused")
            connection.close(error)
            return []

    def _end_what_fails(self) -> None:
        """Leave a state that the connection or the time has ended."""
        if self.connection is not None and not self.connection.is_open:
            self._lose(str(self.connection.error))
        now = self._clock()
        if self.state is State.CONNECTING and now > self._dialed_at + CONNECT_WITHIN_S:
            self._lose(f"no answer within {CONNECT_WITHIN_S:.0f} s")
        is_overdue = self.asked_at is not None and now >= self.asked_at + self._deadline_s
        if self.state is State.UP and is_overdue:
            self.count("misses")
            self.state = State.LATE

    def _connect(self) -> None:
        self._dialed_at = self._clock()
        try:
            self.connection = self._dial()
        except OSError as error:
            self._why = str(error)
        else:
            self.state = State.CONNECTING

    def _lose(self, why: str) -> None:
        """Go down. What the worker knew, and the replies that it owes, are void."""
        if self.state is State.CONNECTING:
            why = f"it does not let this target in: {why}"
        self._why = why
        self.close()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.asked_at, self.over = None, None, []
        self.state = State.DOWN

    def _say(self) -> None:
        name = f"The draft worker {self.address}"
        if self.state is State.UP and self.is_foreign:
            why = "it has not the target's tokenizer: it answered with tokens that the target lacks"
            self._report(f"{name} is asked for drafts, but {why}", logging.WARNING)
        elif self.state is State.UP:
            self._report(f"{name} is asked for drafts")
        elif self.state is State.LATE:
            after = f"{1e3 * self._deadline_s:g} ms"
            self._report(f"{name} did not answer within {after}; it is asked again once it does")
        elif self._why:
            self._report(f"{name} is down, and tried again: {self._why}", logging.WARNING)

    def count(self, what: str, amount: int = 1) -> None:
        self._counts.add(f"remote_{what}", amount, self.address)
