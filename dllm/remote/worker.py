"""The draft worker: goes on writing behind every session that it was told of.

Sessions of all targets are drafted together. Tokens of a target that differ from the draft end the
run behind them, and another begins; there is no rollback, because the prefix cache of the engine
finds everything before. A worker that runs ahead drafts on while the target verifies: what it then
has is of use if the target keeps all drafts and its next token is the draft, too.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from dllm.remote.report import Report
from dllm.remote.stream import Server
from dllm.remote.wire import MAX_DRAFT_TOKENS, Delta, Draft, DraftBatch, Reply

SHARE_OF_DEADLINE = 0.7  # the rest is for the way back
IDLE_S = 0.05  # how long a turn waits for batches if nothing is drafted
# With more sessions, or more tokens of all sessions together, sessions of the connection that has
# the most are dropped. This also ends sessions whose end a target did not tell.
MAX_SESSIONS, MAX_TOKENS = 1024, 4_000_000


class Drafts(Protocol):
    """What drafts: an engine (``engine``), or a model of a test."""

    vocab_size: int
    max_len: int  # tokens of the longest sequence

    def start(self, tokens: list[int], count: int) -> str:
        """Begin to write ``count`` tokens behind these; returns the run's name."""

    def stop(self, run: str) -> None:
        """Give up a run."""

    def step(self) -> list[tuple[str, list[int], bool]]:
        """One step of all runs: (run, new tokens, whether it has ended)."""


@dataclass
class DraftSession:
    """A request of a target, as the worker sees it."""

    tokens: list[int] = field(default_factory=list)  # what the target said
    draft: list[int] = field(default_factory=list)  # what is expected behind it
    run: str | None = None  # writes behind the draft
    # The model can read it: not too long, no token id that it does not have. Nothing is kept of
    # another one, and replies are empty.
    is_readable: bool = True

    def hear(self, row: Delta) -> bool:
        """Whether the draft went as far as these tokens and agreed with them; else it is void."""
        assert row.start <= len(self.tokens), (row.start, len(self.tokens))
        expected = self.tokens[row.start :] + self.draft
        self.tokens[row.start :] = row.tokens
        count = len(row.tokens)
        agrees = expected[:count] == row.tokens
        self.draft = expected[count:] if agrees else []
        return agrees


@dataclass
class Peer:
    """A connection, as the worker sees it. Nobody reaches a session of another one."""

    sessions: dict[int, DraftSession] = field(default_factory=dict)  # the one used last is last
    batch: DraftBatch | None = None  # the newest, while its reply is waiting
    due: float = 0.0  # when that has to leave

    @property
    def num_tokens(self) -> int:
        return sum(len(session.tokens) for session in self.sessions.values())


class Counts:
    """What a worker has done: it is printed when the worker ends. ``drafted`` counts tokens."""

    def __init__(self) -> None:
        self.batches = self.replies = self.runs = self.dropped_runs = self.drafted = 0


class DraftWorker:
    """Hears batches, drafts and replies. ``ahead``: tokens drafted beyond those asked for."""

    def __init__(
        self, drafts: Drafts, ahead: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts = Counts()
        self._drafts, self._ahead, self._clock = drafts, ahead, clock
        self._peers: dict[int, Peer] = {}  # by the number of the connection
        self._runs: dict[str, DraftSession] = {}
        self._report = Report(clock)

    @property
    def num_sessions(self) -> int:
        return sum(len(peer.sessions) for peer in self._peers.values())

    @property
    def num_tokens(self) -> int:
        return sum(peer.num_tokens for peer in self._peers.values())

    @property
    def is_busy(self) -> bool:
        return bool(self._runs) or any(peer.batch for peer in self._peers.values())

    def serve(self, server: Server, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.turn(server)

    def turn(self, server: Server) -> None:
        for connection, batch in server.receive(0.0 if self.is_busy else IDLE_S):
            if batch is None:
                self.leave(connection)
            else:
                self.hear(connection, batch)
        self._reply(server)
        if self._runs:
            self.draft()
            self._reply(server)

    def _reply(self, server: Server) -> None:
        for connection, reply in self.replies():
            server.reply(connection, reply)

    # --- batches ----------------------------------------------------------------------------------

    def hear(self, connection: int, batch: DraftBatch) -> None:
        """Take a batch: what it tells at once, what it asks for by ``draft`` and ``replies``.

        One that is still waiting is answered together with it, and no later than it was due.
        """
        now = self._clock()
        self.counts.batches += 1
        peer = self._peers.setdefault(connection, Peer())
        for number in batch.over:
            self._end(peer, number)
        for row in batch.rows:
            self._hear_row(peer, row)
        self._make_room()
        if any(row.want for row in batch.rows):
            due = now + 1e-6 * SHARE_OF_DEADLINE * batch.deadline_us
            peer.due = due if peer.batch is None else min(due, peer.due)
            peer.batch = batch

    def leave(self, connection: int) -> None:
        """A connection is closed: its sessions are over."""
        peer = self._peers.pop(connection, Peer())
        for number in list(peer.sessions):
            self._end(peer, number)

    def _hear_row(self, peer: Peer, row: Delta) -> None:
        session = peer.sessions.pop(row.session, None) or DraftSession()
        if row.start > len(session.tokens) and session.is_readable:
            self._drop_run(session)
            return  # replied as unknown
        peer.sessions[row.session] = session
        if not session.is_readable:
            return
        if not session.hear(row):
            self._drop_run(session)
        is_known = max(row.tokens, default=0) < self._drafts.vocab_size
        if not is_known:
            self._report(
                "A target sends tokens that this model lacks: they have not the same tokenizer. It "
                "gets no drafts for such texts",
                logging.WARNING,
            )
        session.is_readable = is_known and len(session.tokens) <= self._drafts.max_len
        if not session.is_readable:
            self._drop_run(session)
            session.tokens, session.draft = [], []
        if row.want and session.run is None and len(session.draft) < row.want + self._ahead:
            self._start(session, row.want)

    def _start(self, session: DraftSession, want: int) -> None:
        """Begin a run behind the session's tokens and draft, if there is room for its tokens."""
        known = session.tokens + session.draft
        count = want + self._ahead - len(session.draft)
        count = min(count, self._drafts.max_len - len(known))
        if count < 1 or not known:
            return
        session.run = self._drafts.start(known, count)
        self._runs[session.run] = session
        self.counts.runs += 1

    def _drop_run(self, session: DraftSession) -> None:
        if session.run is not None:
            self._drafts.stop(session.run)
            del self._runs[session.run]
            session.run = None
            self.counts.dropped_runs += 1

    def _end(self, peer: Peer, number: int) -> None:
        session = peer.sessions.pop(number, None)
        if session is not None:
            self._drop_run(session)

    def _make_room(self) -> None:
        """Drop sessions of the connection that has most, those first that waited longest."""
        peers = self._peers.values()
        while self.num_sessions > MAX_SESSIONS:
            most = max(peers, key=lambda peer: len(peer.sessions))
            self._end(most, next(iter(most.sessions)))
        while self.num_tokens > MAX_TOKENS:
            most = max(peers, key=lambda peer: peer.num_tokens)
            self._end(most, next(iter(most.sessions)))

    # --- drafts -----------------------------------------------------------------------------------

    def draft(self) -> None:
        for run, tokens, has_ended in self._drafts.step():
            session = self._runs.get(run)
            if session is None:
                continue
            session.draft += tokens
            self.counts.drafted += len(tokens)
            if has_ended:
                del self._runs[run]
                session.run = None

    def replies(self) -> Iterator[tuple[int, Reply]]:
        """Replies that are complete, or due, with who gets them."""
        now = self._clock()
        for connection, peer in self._peers.items():
            if peer.batch is None:
                continue
            rows, is_complete = [], True
            for row in peer.batch.rows:
                if not row.want:
                    continue
                session = peer.sessions.get(row.session)
                length = row.start + len(row.tokens)
                if session is None or (session.is_readable and len(session.tokens) < length):
                    rows.append(Draft(row.session, row.start, [], is_unknown=True))
                    continue
                is_complete &= len(session.draft) >= row.want or session.run is None
                most = min(row.want + self._ahead, MAX_DRAFT_TOKENS)
                start = max(length, len(session.tokens))
                rows.append(Draft(row.session, start, session.draft[:most]))
            if is_complete or now >= peer.due:
                step, peer.batch = peer.batch.step, None
                self.counts.replies += 1
                yield connection, Reply(step, rows)
