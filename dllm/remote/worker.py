"""The draft worker: goes on writing behind every session that it was told of.

Sessions of all targets are drafted together. Tokens of a target that differ from the guess end the
run behind them, and another begins; there is no rollback, because the prefix cache of the engine
finds everything before. A worker that runs ahead drafts on while the target verifies: what it then
has is of use if the target keeps all drafts and its next token is the guess, too.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dllm.remote.link import Server
from dllm.remote.sessions import hear
from dllm.remote.wire import MAX_GUESS, OVER, REPLY, UNKNOWN, Message, Row

SHARE_OF_DEADLINE = 0.7  # the rest is for the way back
IDLE_S, BUSY_S = 0.05, 0.0  # how long a turn waits for asks


class Drafts(Protocol):
    """What drafts: an engine (``engine``), or a model of a test.

    Attributes:
        vocab_size: it reads token ids below.
        max_len: tokens of the longest sequence.
    """

    vocab_size: int
    max_len: int

    def start(self, tokens: list[int], count: int) -> str:
        """Begin to write ``count`` tokens behind these; returns the run's name."""

    def stop(self, run: str) -> None:
        """Give up a run."""

    def step(self) -> list[tuple[str, list[int], bool]]:
        """One step of all runs: (run, new tokens, whether it has ended)."""


@dataclass(frozen=True)
class Limits:
    """What a worker takes on.

    Attributes:
        ahead: tokens drafted beyond those asked for; 0 does not run ahead.
        max_sessions: sessions kept; of more, those that nobody asked for longest are dropped.
        max_tokens: tokens kept, of all sessions together; as ``max_sessions``.
        ttl_s: seconds after which a session that nobody asks for is dropped.
    """

    ahead: int = 0
    max_sessions: int = 1024
    max_tokens: int = 4_000_000
    ttl_s: float = 60.0


@dataclass
class Work:
    """A session as the worker sees it.

    Attributes:
        tokens, guess: what the target said, and what is expected behind it.
        run: writes behind the guess; None if nothing does.
        used: when it was last asked for, by the worker's clock.
        is_readable: the model can read it: not too long, no token id that it does not have. Nothing
            is kept of another one, and replies are empty.
    """

    tokens: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    run: str | None = None
    used: float = 0.0
    is_readable: bool = True


class Ask(NamedTuple):
    """A message that waits for its reply, until ``end`` at most."""

    message: Message
    end: float


class Counts:
    """What the worker did, since it started."""

    def __init__(self) -> None:
        self.asks = self.replies = self.runs = self.dropped_runs = self.drafted = 0


Key = tuple[bytes, int]  # connection, session: nobody reaches a session of another connection


class DraftWorker:
    """Hears asks, drafts and replies.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        drafts: Drafts,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits or Limits()
        self.counts = Counts()
        self._drafts, self._clock = drafts, clock
        self._works: dict[Key, Work] = {}  # the one used last is last
        self._incarnations: dict[bytes, int] = {}
        self._asks: dict[bytes, Ask] = {}  # of each connection the newest: nobody waits for others
        self._runs: dict[str, Work] = {}
        self._num_tokens = 0  # of all sessions

    @property
    def num_sessions(self) -> int:
        """Sessions that are kept."""
        return len(self._works)

    @property
    def is_busy(self) -> bool:
        """Whether something is drafted or waits for a reply."""
        return bool(self._runs or self._asks)

    def serve(self, server: Server, goes_on: Callable[[], bool]) -> None:
        """Serve as long as ``goes_on()``."""
        while goes_on():
            self.turn(server)

    def turn(self, server: Server) -> None:
        """Hear what is there, draft one step, reply what is ready."""
        for peer, message in server.receive(BUSY_S if self.is_busy else IDLE_S):
            self.hear(peer, message)
        self._reply(server)
        if self._runs:
            self.draft()
            self._reply(server)
        self._forget_old()

    def _reply(self, server: Server) -> None:
        for peer, reply in self.replies():
            server.reply(peer, reply)

    # --- asks -------------------------------------------------------------------------------------

    def hear(self, peer: bytes, message: Message) -> None:
        """Take an ask: what it tells at once, what it asks for by ``draft`` and ``replies``."""
        now = self._clock()
        self.counts.asks += 1
        if self._incarnations.get(peer) != message.incarnation:
            for key in [key for key in self._works if key[0] == peer]:
                self._end(key)
            self._incarnations[peer] = message.incarnation
        for row in message.rows:
            key = peer, row.session
            if row.extra == OVER:
                self._end(key)
            else:
                self._hear_row(key, row, now)
        if not message.rows or any(row.extra not in (0, OVER) for row in message.rows):
            wait_s = 1e-6 * SHARE_OF_DEADLINE * message.deadline_us
            self._asks[peer] = Ask(message, now + wait_s)

    def _hear_row(self, key: Key, row: Row, now: float) -> None:
        work = self._works.pop(key, None) or Work()
        if row.start > len(work.tokens) and work.is_readable:
            self._drop_run(work)
            self._num_tokens -= len(work.tokens)
            return  # replied as unknown
        self._works[key] = work
        work.used = now
        if not work.is_readable:
            return
        num_before = len(work.tokens)
        left = hear(work.tokens, work.guess, row)
        if left is None:
            self._drop_run(work)
        work.guess = left or []
        is_known = max(row.tokens, default=0) < self._drafts.vocab_size
        work.is_readable = is_known and len(work.tokens) <= self._drafts.max_len
        if not work.is_readable:
            self._drop_run(work)
            work.tokens, work.guess = [], []
        self._num_tokens += len(work.tokens) - num_before
        self._make_room()
        if key not in self._works or work.run is not None:
            return
        if row.extra and len(work.guess) < row.extra + self.limits.ahead:
            self._start(work, row.extra)

    def _start(self, work: Work, want: int) -> None:
        """Begin a run behind the session's tokens and guess, if there is room for its tokens."""
        known = work.tokens + work.guess
        count = want + self.limits.ahead - len(work.guess)
        count = min(count, self._drafts.max_len - len(known))
        if count < 1 or not known:
            return
        work.run = self._drafts.start(known, count)
        self._runs[work.run] = work
        self.counts.runs += 1

    def _drop_run(self, work: Work) -> None:
        if work.run is not None:
            self._drafts.stop(work.run)
            del self._runs[work.run]
            work.run = None
            self.counts.dropped_runs += 1

    def _end(self, key: Key) -> None:
        work = self._works.pop(key, None)
        if work is not None:
            self._drop_run(work)
            self._num_tokens -= len(work.tokens)

    def _make_room(self) -> None:
        limits = self.limits
        while len(self._works) > limits.max_sessions or self._num_tokens > limits.max_tokens:
            self._end(next(iter(self._works)))

    def _forget_old(self) -> None:
        """Drop sessions that nobody asked for, and connections without any."""
        oldest = self._clock() - self.limits.ttl_s
        while self._works:
            key, work = next(iter(self._works.items()))
            if work.used > oldest:
                break
            self._end(key)
        if len(self._incarnations) > self.limits.max_sessions:
            used = {peer for peer, _ in self._works} | set(self._asks)
            self._incarnations = {p: i for p, i in self._incarnations.items() if p in used}

    # --- drafts -----------------------------------------------------------------------------------

    def draft(self) -> None:
        """One step of all runs."""
        for run, tokens, has_ended in self._drafts.step():
            work = self._runs.get(run)
            if work is None:
                continue
            work.guess += tokens
            self.counts.drafted += len(tokens)
            if has_ended:
                del self._runs[run]
                work.run = None

    def replies(self) -> Iterator[tuple[bytes, Message]]:
        """Replies that are complete, or due, with who gets them."""
        now = self._clock()
        for peer, (message, end) in list(self._asks.items()):
            rows, is_complete = [], True
            for row in message.rows:
                if row.extra in (0, OVER):
                    continue
                work = self._works.get((peer, row.session))
                length = row.start + len(row.tokens)
                if work is None or (work.is_readable and len(work.tokens) < length):
                    rows.append(Row(row.session, row.start, [], UNKNOWN))
                    continue
                is_complete &= len(work.guess) >= row.extra or work.run is None
                most = min(row.extra + self.limits.ahead, MAX_GUESS)
                start = max(length, len(work.tokens))
                rows.append(Row(row.session, start, work.guess[:most], 0))
            if is_complete or now >= end:
                del self._asks[peer]
                self.counts.replies += 1
                yield peer, Message(REPLY, message.incarnation, message.step, 0, rows)
