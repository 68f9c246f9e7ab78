"""The target's side of a step: tell the workers what is new, ask for drafts, wait for the deadline.

ask      behind a step of the target, when its tokens are known
collect  before the next step is scheduled: what has arrived, or arrives in time
drafts   what of it the target's tokens do not contradict
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dllm.remote.link import Link, wait
from dllm.remote.peers import Peer, choose
from dllm.remote.sessions import Session, news, over, take_guess, usable
from dllm.remote.wire import ASK, MAX_MESSAGE_BYTES, MAX_ROWS, ROW, Message, Row

MAX_ENDED = MAX_ROWS // 2  # more are not told of; the worker drops them by age
MAX_ASK_BYTES = MAX_MESSAGE_BYTES - (1 << 20)  # of tokens; the rest is for sessions that ended
MAX_RESETS = 3  # a worker that forgets a session more often is not asked for it again
Texts = Mapping[str, Sequence[int]]  # the tokens of each request


class Asker:
    """Sessions of one engine core, with the workers that draft for them.

    Args:
        vocab_size: of the target: a reply with another token id is refused whole.
        clock: seconds.
        wait: waits until one of these connections has news, for so many seconds at most.

    Attributes:
        has_missed: the last deadline passed before all needed replies were there.
        num_moves: sessions that went to another worker because theirs fell silent.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[Sequence[Link], float], None] = wait,
    ) -> None:
        self.peers = peers
        self.has_missed = False
        self.num_moves = 0
        self._vocab_size, self._clock, self._wait = vocab_size, clock, wait
        self._sessions: dict[str, Session] = {}
        self._homes: dict[int, tuple[Peer, int]] = {}  # session -> its worker, and incarnation
        self._by_number: dict[int, Session] = {}
        self._ended: dict[Peer, list[Row]] = {}
        self._step = self._number = 0

    def use(self, peers: Sequence[Peer]) -> None:
        """Take other workers. Sessions of one that is missing move when its link is closed."""
        self.peers = peers
        self._ended = {peer: rows for peer, rows in self._ended.items() if peer in peers}

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, texts: Texts, wants: Mapping[str, int], deadline_s: float) -> None:
        """Tell what is new of these requests, and ask for ``wants`` drafts behind each.

        Args:
            deadline_s: how long ``collect`` will wait.
        """
        self._receive()
        for each in self.peers:
            each.probe()
        self._step += 1
        rows, self._ended = self._ended, {}
        told: list[tuple[Peer, Session, int]] = []
        sizes: Counter[Peer] = Counter()
        for name, tokens in texts.items():
            session = self._session(name)
            peer = self._home(session)
            if peer is None or wants[name] < 1 or session.resets > MAX_RESETS:
                continue
            new = news(session, tokens, wants[name])
            size = sum(ROW.size + 4 * len(row.tokens) for row in new)
            asked = rows.setdefault(peer, [])
            if sizes[peer] + size > MAX_ASK_BYTES or len(asked) + len(new) > MAX_ROWS:
                continue  # told with a later ask
            sizes[peer] += size
            asked.extend(new)
            told.append((peer, session, len(tokens)))
        deadline_us = min(round(1e6 * deadline_s), 2**32 - 1)
        sent = {
            peer
            for peer, asked in rows.items()
            if asked and peer.send(Message(ASK, peer.incarnation, self._step, deadline_us, asked))
        }
        for peer, session, length in told:
            if peer in sent:
                session.told = length

    def _session(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            self._number += 1
            session = self._sessions[name] = Session(self._number)
            self._by_number[self._number] = session
        return session

    def _home(self, session: Session) -> Peer | None:
        """The session's worker. A new one knows nothing of it."""
        home = self._homes.get(session.number)
        if home is not None and not home[0].is_silent and home[0].incarnation == home[1]:
            return home[0]
        peer = choose(self.peers, session.number)
        session.told = 0
        if peer is not None:
            self.num_moves += home is not None and home[0] is not peer
            self._homes[session.number] = peer, peer.incarnation
        return peer

    def end(self, names: Iterable[str]) -> None:
        """These requests are over; their workers hear of it with the next ask."""
        for name in names:
            session = self._sessions.pop(name, None)
            if session is None:
                continue
            del self._by_number[session.number]
            peer, incarnation = self._homes.pop(session.number, (None, 0))
            if peer is not None and not peer.is_silent and peer.incarnation == incarnation:
                ended = self._ended.setdefault(peer, [])
                if len(ended) < MAX_ENDED:
                    ended.append(over(session))

    @property
    def names(self) -> set[str]:
        """The requests that have a session."""
        return set(self._sessions)

    # --- answers ----------------------------------------------------------------------------------

    def collect(self, texts: Texts, deadline_s: float) -> float:
        """Take replies; wait for those that are needed and awaited, ``deadline_s`` at most.

        Returns:
            Seconds waited.
        """
        start = self._clock()
        self.has_missed = False
        self._receive()
        waited_for: set[Peer] = set()
        while awaited := self._awaited(texts):
            waited_for |= awaited
            left = start + deadline_s - self._clock()
            if left <= 0:
                self.has_missed = True
                break
            self._wait([peer.link for peer in self.peers], left)  # type: ignore[misc]
            self._receive()
        useful = {peer for peer, has_drafts in self._needs(texts) if has_drafts}
        for peer in useful - awaited:
            peer.meet()
        for peer in awaited | (waited_for - useful):
            peer.miss()
        return self._clock() - start

    def _needs(self, texts: Texts) -> Iterator[tuple[Peer, bool]]:
        """Of each request that has a worker: the worker, and whether a draft is there."""
        for name, tokens in texts.items():
            session = self._sessions.get(name)
            if session is not None and session.number in self._homes:
                peer, _ = self._homes[session.number]
                yield peer, bool(usable(session, tokens, 1))

    def _awaited(self, texts: Texts) -> set[Peer]:
        """Workers whose reply is on its way, and needed: some request has no usable draft."""
        return {
            peer
            for peer, has_drafts in self._needs(texts)
            if not (has_drafts or peer.is_silent or peer.awaited is None)
        }

    def drafts(self, name: str, tokens: Sequence[int], limit: int) -> list[int]:
        """Drafts behind the tokens of a request; none if there are none, or the tokens differ."""
        session = self._sessions.get(name)
        return [] if session is None or limit < 1 else usable(session, tokens, limit)

    def _receive(self) -> None:
        for peer in self.peers:
            for reply in peer.receive():
                self._read(peer, reply)

    def _read(self, peer: Peer, reply: Message) -> None:
        if any(max(row.tokens, default=0) >= self._vocab_size for row in reply.rows):
            peer.num_refused += 1
            return
        for row in reply.rows:
            session = self._by_number.get(row.session)
            home = self._homes.get(row.session)
            if session is not None and home == (peer, peer.incarnation):
                take_guess(session, row, reply.step)
