"""The workers of a target: which one drafts for a session, and which ones nobody waits for.

A session belongs to the worker with the highest random weight (rendezvous hashing), so that a
worker that goes away moves its own sessions only, and targets need not agree on anything.

A worker for which MISSES steps in a row waited for nothing, or whose connection breaks, is silent:
nobody waits for it, its sessions move to others, and it is asked now and then whether it is there.
Its first answer brings it back on probation: one more miss makes it silent again, for twice as
long; MISSES steps in a row with drafts in time end the probation.
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dllm.remote.wire import ASK, OVER, Message

MISSES = 3
FIRST_PROBE_S, LAST_PROBE_S = 0.05, 1.0


class Connection(Protocol):
    """What ``link.Link`` is to a peer; tests have others."""

    address: str
    is_up: bool
    num_ups: int
    num_refused: int

    def send(self, message: Message) -> bool:
        """Whether the message is on its way."""

    def receive(self) -> list[Message]:
        """All replies that are there."""

    def close(self) -> None:
        """Close the connection; ``is_up`` is false from then on."""


class Peer:
    """One worker, as a target sees it.

    Args:
        clock: seconds.

    Attributes:
        incarnation: changes when the worker's sessions are void, so that the worker drops them.
        awaited: the step of the last ask; None if it was answered, or nobody waits any more.
        num_asks, num_replies, num_misses: since the start; replies in time or not.
        num_silences: how often it became silent.
        num_refused: replies with token ids that the target does not have.
    """

    def __init__(self, link: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
        self.link = link
        self.incarnation = random.getrandbits(64)
        self.awaited: int | None = None
        self.num_asks = self.num_replies = self.num_misses = self.num_silences = 0
        self.num_refused = 0
        self._clock = clock
        self._misses_in_a_row = self._meets_in_a_row = 0
        self._is_on_probation = False
        self._is_up, self._num_ups = False, 0  # as of the last look at the link
        self._probe_every, self._next_probe = FIRST_PROBE_S, 0.0

    @property
    def is_silent(self) -> bool:
        """Whether nobody waits for it."""
        return not self.link.is_up or self._misses_in_a_row >= MISSES

    def receive(self) -> list[Message]:
        """Replies to this incarnation; takes note of connections that broke or came up."""
        replies = self.link.receive()
        if self._num_ups != self.link.num_ups or self._is_up != self.link.is_up:
            if self._is_up:
                self._fall_silent()
            if self.link.is_up:
                self._misses_in_a_row, self._probe_every = 0, FIRST_PROBE_S
                self._is_on_probation = False
            self._is_up, self._num_ups = self.link.is_up, self.link.num_ups
        replies = [reply for reply in replies if reply.incarnation == self.incarnation]
        self.num_replies += len(replies)
        for reply in replies:
            if self.awaited is not None and reply.step >= self.awaited:
                self.awaited = None
            elif self.is_silent and self.link.is_up:
                self._misses_in_a_row, self._is_on_probation = MISSES - 1, True
        return replies

    def send(self, message: Message) -> bool:
        """Ask; whether the ask is on its way."""
        is_sent = self.link.send(message)
        if is_sent:
            self.num_asks += 1
            if any(row.extra not in (0, OVER) for row in message.rows):
                self.awaited = message.step  # others get no reply
        return is_sent

    def meet(self) -> None:
        """It has brought drafts in time."""
        self._meets_in_a_row += 1
        if self._meets_in_a_row == MISSES:
            self._is_on_probation, self._probe_every = False, FIRST_PROBE_S
        if not self._is_on_probation:
            self._misses_in_a_row = 0

    def miss(self) -> None:
        """The wait was for nothing: no reply before the deadline, or one without a draft."""
        self.awaited = None
        self.num_misses += 1
        self._meets_in_a_row = 0
        self._misses_in_a_row += 1
        if self._misses_in_a_row == MISSES:
            self._fall_silent()

    def _fall_silent(self) -> None:
        self.awaited = None
        self.num_silences += 1
        self.incarnation = random.getrandbits(64)
        self._next_probe = self._clock() + self._probe_every
        self._probe_every = min(2 * self._probe_every, LAST_PROBE_S)

    def probe(self) -> None:
        """Ask a silent worker whether it is there, if it is time to."""
        if self.link.is_up and self.is_silent and self._clock() >= self._next_probe:
            self._next_probe = self._clock() + FIRST_PROBE_S
            self.link.send(Message(ASK, self.incarnation, 0, 0, []))


def choose(peers: Sequence[Peer], key: int) -> Peer | None:
    """Of the workers that are not silent the one for a session; None if all are silent."""
    able = [peer for peer in peers if not peer.is_silent]
    return max(able, key=lambda peer: _weight(peer.link.address, key), default=None)


def _weight(address: str, key: int) -> bytes:
    return hashlib.blake2b(f"{key} {address}".encode(), digest_size=8).digest()
