"""A target's side: connections to draft workers, and what each of them knows of each request.

ask      behind a step of the target, when its tokens are known: tell what is new, ask for drafts
collect  before the next step is scheduled: what has arrived, or arrives in time
usable   of a session: drafts that the target's tokens do not contradict

How long a step waits, and whether it asks at all, is the width policy's decision (``drafter``). A
worker that is *out* (``link``) is not asked, and nobody waits for it.
"""

import hashlib
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dllm.engine.metrics import Counts
from dllm.remote.link import RECONNECT_S, Link
from dllm.remote.stream import Stream, wait
from dllm.remote.wire import MAX_DELTA_TOKENS, MAX_ROWS, Delta, Draft, DraftBatch

MAX_RESETS = 3  # a worker that forgets a session more often is not asked for it again


class DraftRequest(NamedTuple):
    """The tokens of a request, and how many drafts (``want``) are wanted behind them at most."""

    tokens: Sequence[int]
    want: int


@dataclass
class Session:
    """A request as the target sees it."""

    number: int  # its name in messages
    link: Link | None = None  # its worker
    num_ups: int = 0  # which of that link's connections knows the session
    num_sent: int = 0  # how many of its tokens the worker has
    is_asked: bool = False  # the last batch asked for drafts of this session, too
    start: int = 0  # the draft stands behind so many tokens
    draft: list[int] = field(default_factory=list)  # token ids that the worker expects there
    resets: int = 0  # how often the worker said that it lacks tokens

    @property
    def is_known(self) -> bool:
        return self.link is not None and self.link.is_up and self.link.num_ups == self.num_ups

    def take(self, row: Draft) -> None:
        if row.is_unknown:
            self.num_sent, self.is_asked = 0, False
            self.resets += 1
        else:
            self.start, self.draft = row.start, row.tokens

    def usable(self, request: DraftRequest) -> list[int]:
        """The rest of the draft, as much as is wanted, unless the tokens contradict it."""
        done = len(request.tokens) - self.start
        if not 0 <= done < len(self.draft):
            return []
        if list(request.tokens[self.start :]) != self.draft[:done]:
            return []
        return self.draft[done : done + request.want]


class Client:
    """The sessions of one engine core, with the workers that draft for them.

    A session belongs to a worker on this machine, if one is there, and among several to the one
    with the highest random weight (rendezvous hashing), so that a worker that is out moves its own
    sessions only, and targets need not agree on anything. A reply with a token id beyond
    ``vocab_size``, the target's, is refused whole.
    """

    def __init__(
        self,
        links: Sequence[Link],
        vocab_size: int,
        counts: Counts,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[Sequence[Stream], float], None] = wait,
    ) -> None:
        self.links = links
        self._vocab_size, self._counts, self._clock, self._wait = vocab_size, counts, clock, wait
        self.sessions: dict[str, Session] = {}  # by request, of those that were asked for
        self._step = self._number = 0
        self._received_at = float("-inf")

    def use(self, links: Sequence[Link]) -> None:
        """Use these workers; connections to others are closed."""
        for link in self.links:
            if link not in links:
                link.close()
        self.links = links

    def ask(self, requests: Mapping[str, DraftRequest], deadline_s: float) -> None:
        """Tell what is new, and ask for drafts. ``deadline_s``: how long ``collect`` will wait."""
        for session in self.sessions.values():
            session.is_asked = False
        has_news = bool(requests) or any(link.over for link in self.links)
        if not has_news and self._clock() < self._received_at + RECONNECT_S:
            return  # while nobody drafts, a look at all connections would cost each step 1 %
        self._receive()
        self._step += 1
        batches: dict[Link, list[tuple[Session, Delta]]] = {link: [] for link in self.links}
        room = {link: MAX_DELTA_TOKENS for link in self.links}
        for name, request in requests.items():
            session = self._session(name)
            link = self._home(session)
            if link is None or request.want < 1 or session.resets > MAX_RESETS:
                continue
            new = list(request.tokens[session.num_sent : session.num_sent + room[link]])
            is_all = session.num_sent + len(new) == len(request.tokens)
            if len(batches[link]) < MAX_ROWS and (new or is_all):
                want = request.want if is_all else 0  # the rest goes with the next batch
                batches[link].append((session, Delta(session.number, session.num_sent, new, want)))
                room[link] -= len(new)
        deadline_us = min(round(1e6 * deadline_s), 2**32 - 1)
        for link, asked in batches.items():
            if not (asked or link.over) or link.is_out:
                continue
            rows = [row for _, row in asked]
            if link.ask(DraftBatch(self._step, deadline_us, rows, link.over)):
                for session, row in asked:
                    session.num_sent = row.start + len(row.tokens)
                    session.is_asked = row.want > 0

    def collect(self, requests: Mapping[str, DraftRequest], seconds: float) -> float:
        """Wait for replies that are needed and awaited, ``seconds`` at most; returns how long."""
        start = self._clock()
        self._receive()
        while any(self._is_awaited(name, request) for name, request in requests.items()):
            left = start + seconds - self._clock()
            if left <= 0:
                break
            self._wait([each.connection for each in self.links if each.connection], left)
            self._receive()
        return self._clock() - start

    def _is_awaited(self, name: str, request: DraftRequest) -> bool:
        """Whether a request has no usable draft, and a reply for it is on its way."""
        session = self.sessions.get(name)
        if session is None or session.link is None or not (session.is_asked and session.is_known):
            return False
        is_coming = not session.link.is_out and session.link.asked_at is not None
        return is_coming and not session.usable(request)

    def keep(self, names: Container[str]) -> None:
        """End the sessions of all other requests; their workers hear of it with the next batch."""
        for name in [name for name in self.sessions if name not in names]:
            self._leave(self.sessions.pop(name))

    def _session(self, name: str) -> Session:
        session = self.sessions.get(name)
        if session is None:
            self._number += 1
            session = self.sessions[name] = Session(self._number)
        return session

    def _home(self, session: Session) -> Link | None:
        """The session's worker; if that is out, another one, which has to be told everything."""
        link = session.link
        if link is None or link.is_out or link not in self.links:
            link = choose(self.links, session.number)
        if link is None or (link is session.link and session.is_known):
            return link
        if session.link is not None and link is not session.link:
            self._counts.add("remote_moves")
            self._leave(session)
        session.link, session.num_ups, session.num_sent = link, link.num_ups, 0
        return link

    def _leave(self, session: Session) -> None:
        """Let its worker know that the session is over, as far as a message has room."""
        if session.link is not None and session.is_known and len(session.link.over) < MAX_ROWS:
            session.link.over.append(session.number)

    def _receive(self) -> None:
        self._received_at = self._clock()
        for link in self.links:
            for reply in link.receive():
                if any(max(row.tokens, default=0) >= self._vocab_size for row in reply.rows):
                    link.count("refused")
                    link.is_foreign = True
                    continue
                by_number = {session.number: session for session in self.sessions.values()}
                for row in reply.rows:
                    session = by_number.get(row.session)
                    if session is not None and session.link is link:
                        session.take(row)


def choose(links: Sequence[Link], key: int) -> Link | None:
    """The worker for a session: one on this machine before others; None if all are out."""

    def weight(link: Link) -> bytes:
        return hashlib.blake2b(f"{key} {link.address}".encode(), digest_size=8).digest()

    there = [link for link in links if not link.is_out]
    return max([link for link in there if link.is_near] or there, key=weight, default=None)
