"""The draft worker: goes on writing behind every session that it was told of.

Sessions of all targets are drafted together. Tokens of a target that differ from the guess end the
run behind them, and another begins; there is no rollback, because the prefix cache of the engine
finds everything before. A worker that runs ahead drafts on while the target verifies: what it then
has is of use if the target keeps all drafts and its next token is the guess, too.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from dllm.remote.report import Report
from dllm.remote.stream import Server
from dllm.remote.wire import MAX_GUESS, Ask, Guess, Reply, Told

SHARE_OF_DEADLINE = 0.7  # the rest is for the way back
IDLE_S = 0.05  # how long a turn waits for asks if nothing is drafted
# With more sessions, or more tokens of all sessions together, sessions of the connection that has
# the most are dropped. This also ends sessions whose end a target did not tell.
MAX_SESSIONS, MAX_TOKENS = 1024, 4_000_000


class Drafts(Protocol):
    """What drafts: an engine (``engine``), or a model of a test.

    Attributes:
        vocab_size: token ids are less than this.
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


@dataclass
class Work:
    """A request of a target, as the worker sees it.

    Attributes:
        tokens, guess: what the target said, and what is expected behind it.
        run: writes behind the guess; None if nothing does.
        is_readable: the model can read it: not too long, no token id that it does not have. Nothing
            is kept of another one, and replies are empty.
    """

    tokens: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    run: str | None = None
    is_readable: bool = True

    def hear(self, row: Told) -> bool:
        """Take an ask's tokens, and keep what is left of the guess.

        Returns:
            Whether the guess went as far as these tokens and agreed with them; if not, it is void.
        """
        assert row.start <= len(self.tokens), (row.start, len(self.tokens))
        expected = self.tokens[row.start :] + self.guess
        self.tokens[row.start :] = row.tokens
        count = len(row.tokens)
        agrees = expected[:count] == row.tokens
        self.guess = expected[count:] if agrees else []
        return agrees


@dataclass
class Asker:
    """A connection, as the worker sees it. Nobody reaches a session of another one.

    Attributes:
        works: by session; the one used last is last.
        ask, due: the newest ask, and when its reply has to leave; None if none is waiting.
    """

    works: dict[int, Work] = field(default_factory=dict)
    ask: Ask | None = None
    due: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works.values())


class Counts:
    def __init__(self) -> None:
        self.asks = self.replies = self.runs = self.dropped_runs = self.drafted = 0


class DraftWorker:
    """Hears asks, drafts and replies.

    Args:
        ahead: tokens drafted beyond those asked for; 0 does not run ahead.
    """

    def __init__(
        self, drafts: Drafts, ahead: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts = Counts()
        self._drafts, self._ahead, self._clock = drafts, ahead, clock
        self._askers: dict[int, Asker] = {}  # by the number of the connection
        self._runs: dict[str, Work] = {}
        self._report = Report(clock)

    @property
    def num_sessions(self) -> int:
        return sum(len(asker.works) for asker in self._askers.values())

    @property
    def num_tokens(self) -> int:
        return sum(asker.num_tokens for asker in self._askers.values())

    @property
    def is_busy(self) -> bool:
        return bool(self._runs) or any(asker.ask for asker in self._askers.values())

    def serve(self, server: Server, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.turn(server)

    def turn(self, server: Server) -> None:
        for peer, ask in server.receive(0.0 if self.is_busy else IDLE_S):
            if ask is None:
                self.leave(peer)
            else:
                self.hear(peer, ask)
        self._reply(server)
        if self._runs:
            self.draft()
            self._reply(server)

    def _reply(self, server: Server) -> None:
        for peer, reply in self.replies():
            server.reply(peer, reply)

    # --- asks -------------------------------------------------------------------------------------

    def hear(self, peer: int, ask: Ask) -> None:
        """Take an ask: what it tells at once, what it asks for by ``draft`` and ``replies``.

        One that is still waiting is answered together with it, and no later than it was due.
        """
        now = self._clock()
        self.counts.asks += 1
        asker = self._askers.setdefault(peer, Asker())
        for session in ask.over:
            self._end(asker, session)
        for row in ask.rows:
            self._hear_row(asker, row)
        self._make_room()
        if any(row.want for row in ask.rows):
            due = now + 1e-6 * SHARE_OF_DEADLINE * ask.deadline_us
            asker.due = due if asker.ask is None else min(due, asker.due)
            asker.ask = ask

    def leave(self, peer: int) -> None:
        """A connection is closed: its sessions are over."""
        asker = self._askers.pop(peer, Asker())
        for session in list(asker.works):
            self._end(asker, session)

    def _hear_row(self, asker: Asker, row: Told) -> None:
        work = asker.works.pop(row.session, None) or Work()
        if row.start > len(work.tokens) and work.is_readable:
            self._drop_run(work)
            return  # replied as unknown
        asker.works[row.session] = work
        if not work.is_readable:
            return
        if not work.hear(row):
            self._drop_run(work)
        is_known = max(row.tokens, default=0) < self._drafts.vocab_size
        if not is_known:
            self._report(
                "A target sends tokens that this model lacks: they have not the same tokenizer. It "
                "gets no drafts for such texts",
                logging.WARNING,
            )
        work.is_readable = is_known and len(work.tokens) <= self._drafts.max_len
        if not work.is_readable:
            self._drop_run(work)
            work.tokens, work.guess = [], []
        if row.want and work.run is None and len(work.guess) < row.want + self._ahead:
            self._start(work, row.want)

    def _start(self, work: Work, want: int) -> None:
        """Begin a run behind the session's tokens and guess, if there is room for its tokens."""
        known = work.tokens + work.guess
        count = want + self._ahead - len(work.guess)
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

    def _end(self, asker: Asker, session: int) -> None:
        work = asker.works.pop(session, None)
        if work is not None:
            self._drop_run(work)

    def _make_room(self) -> None:
        """Drop sessions of the connection that has most, those first that waited longest."""
        askers = self._askers.values()
        while self.num_sessions > MAX_SESSIONS:
            most = max(askers, key=lambda asker: len(asker.works))
            self._end(most, next(iter(most.works)))
        while self.num_tokens > MAX_TOKENS:
            most = max(askers, key=lambda asker: asker.num_tokens)
            self._end(most, next(iter(most.works)))

    # --- drafts -----------------------------------------------------------------------------------

    def draft(self) -> None:
        for run, tokens, has_ended in self._drafts.step():
            work = self._runs.get(run)
            if work is None:
                continue
            work.guess += tokens
            self.counts.drafted += len(tokens)
            if has_ended:
                del self._runs[run]
                work.run = None

    def replies(self) -> Iterator[tuple[int, Reply]]:
        """Replies that are complete, or due, with who gets them."""
        now = self._clock()
        for peer, asker in self._askers.items():
            if asker.ask is None:
                continue
            rows, is_complete = [], True
            for row in asker.ask.rows:
                if not row.want:
                    continue
                work = asker.works.get(row.session)
                length = row.start + len(row.tokens)
                if work is None or (work.is_readable and len(work.tokens) < length):
                    rows.append(Guess(row.session, row.start, [], is_unknown=True))
                    continue
                is_complete &= len(work.guess) >= row.want or work.run is None
                most = min(row.want + self._ahead, MAX_GUESS)
                start = max(length, len(work.tokens))
                rows.append(Guess(row.session, start, work.guess[:most]))
            if is_complete or now >= asker.due:
                step, asker.ask = asker.ask.step, None
                self.counts.replies += 1
                yield peer, Reply(step, rows)
