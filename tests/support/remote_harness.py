"""Draft workers without a model, networks without sockets, and a target that is a function.

All of them share a clock that only moves when somebody waits, so that tests of deadlines are exact
and take no time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.remote.asker import Asker
from dllm.remote.drafter import RemoteDrafter, StepRow
from dllm.remote.ngram import Ngrams
from dllm.remote.peers import Peer
from dllm.remote.wire import Message, decode, encode
from dllm.remote.worker import DraftWorker, Limits
from tests.support.oracle import VOCAB, Oracle, truth

TICK_S = 1e-4


@dataclass
class Clock:
    """Seconds, as far as they were waited."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Net:
    """A connection to a worker through a network that delays, loses and reorders (``Connection``).

    Args:
        delay_s, jitter_s: one way; messages overtake each other if there is jitter.
        loss: share of the messages that are lost, each way.
        draft_s: a step of the worker's engine.
    """

    def __init__(
        self,
        worker: DraftWorker,
        clock: Clock,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        draft_s: float = TICK_S,
        address: str = "tcp://127.0.0.1:1",
    ) -> None:
        self.address, self.worker, self.clock = address, worker, clock
        self.delay_s, self.jitter_s, self.loss, self.draft_s = delay_s, jitter_s, loss, draft_s
        self.is_up, self.num_ups, self.num_refused = True, 1, 0
        self.is_hung = self.is_closed = False
        self._random, self._drafted_at = random.Random(1), 0.0
        self._out: list[tuple[float, bytes]] = []
        self._back: list[tuple[float, bytes]] = []
        self.sent: list[Message] = []

    def send(self, message: Message) -> bool:
        assert not self.is_closed
        if not self.is_up:
            return False
        self.sent.append(message)
        self._post(self._out, message)
        return True

    def _post(self, way: list[tuple[float, bytes]], message: Message) -> None:
        if self._random.random() >= self.loss:
            late = self.delay_s + self._random.random() * self.jitter_s
            way.append((self.clock.now + late, encode(message)))

    def _due(self, way: list[tuple[float, bytes]]) -> list[Message]:
        due = sorted(each for each in way if each[0] <= self.clock.now)
        way[:] = [each for each in way if each[0] > self.clock.now]
        return [decode(data) for _, data in due]

    def turn(self) -> None:
        """What the worker does at this time."""
        if self.is_hung or not self.is_up:
            return
        for message in self._due(self._out):
            self.worker.hear(b"target", message)
        if self.clock.now >= self._drafted_at + self.draft_s:
            self._drafted_at = self.clock.now
            self.worker.draft()
        for _, reply in self.worker.replies():
            self._post(self._back, reply)

    @property
    def has_news(self) -> bool:
        return any(time <= self.clock.now for time, _ in self._back)

    def receive(self) -> list[Message]:
        assert not self.is_closed
        self.turn()
        return self._due(self._back)

    def kill(self) -> None:
        """The worker's process ends, and the connection breaks."""
        self.is_up = False
        self._out.clear()
        self._back.clear()

    def close(self) -> None:
        """The target has no use for it any more."""
        self.kill()
        self.is_closed = True

    def restart(self, worker: DraftWorker) -> None:
        """Another process at the same address."""
        self.worker, self.is_up, self.num_ups = worker, True, self.num_ups + 1


def wait(clock: Clock):
    """What ``Asker`` waits with: the clock moves until a link has news."""

    def waits(links: Sequence[Net], seconds: float) -> None:
        end = clock.now + seconds
        while clock.now < end:
            for link in links:
                link.turn()
            if any(link.has_news for link in links):
                return
            clock.now += min(TICK_S, end - clock.now)
        clock.now = max(clock.now, end)

    return waits


@dataclass
class Request:
    """One request of the simulated target."""

    tokens: list[int]
    end: int
    drafts: list[int] = field(default_factory=list)
    num_steps: int = 0


class Target:
    """A target that is ``truth``, with everything else as in the engine core.

    Attributes:
        steps: seconds of each step, the waiting included.
        widths: drafts verified in each step.
    """

    def __init__(
        self,
        nets: Sequence[Net],
        clock: Clock,
        num_drafts: int = 4,
        step_s: float = 0.01,
        deadline_s: float = 0.05,
        policy: WidthPolicy | None = None,
        ngrams: Ngrams | None = None,
        num_slots: int = 8,
        per_draft_s: float = 0.0,
    ) -> None:
        self.nets, self.clock, self.num_drafts = nets, clock, num_drafts
        self.step_s, self.per_draft_s = step_s, per_draft_s
        self.peers = [Peer(net, clock) for net in nets]
        self.asker = Asker(self.peers, VOCAB, clock, wait(clock))  # type: ignore[arg-type]
        policy = policy or FixedWidth(num_drafts)
        self.drafter = RemoteDrafter(self.asker, ngrams, policy, num_drafts, num_slots, deadline_s)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self.steps: list[float] = []
        self.widths: list[int] = []

    def add(self, name: str, prompt: list[int], num_tokens: int) -> None:
        """A request; its prompt is read in the next step."""
        self.requests[name] = Request(list(prompt), len(prompt) + num_tokens)
        self.drafter.admit([(name, self.requests[name].tokens)])

    def abort(self, name: str) -> None:
        del self.requests[name]

    def step(self) -> None:
        """One step of all requests, and the drafts of the next one."""
        start = self.clock.now
        verified = {name: len(each.drafts) for name, each in self.requests.items()}
        self.widths.append(sum(verified.values()))
        end = start + self.step_s + self.per_draft_s * sum(verified.values())
        while self.clock.now < end:
            for net in self.nets:
                net.turn()
            self.clock.now += min(TICK_S, end - self.clock.now)
        rows = []
        for name, request in list(self.requests.items()):
            in_prompt = request.num_steps == 0
            request.num_steps += 1
            before = len(request.tokens)
            for draft in [*request.drafts, None]:
                own = truth(request.tokens)
                request.tokens.append(own)
                if own != draft or len(request.tokens) == request.end:
                    break
            is_over = len(request.tokens) >= request.end
            limit = 0 if is_over else min(self.num_drafts, request.end - len(request.tokens) - 1)
            sampled = len(request.tokens) - before
            rows.append(StepRow(name, request.tokens, in_prompt, sampled, verified[name], limit))
            if is_over:
                self.finished[name] = self.requests.pop(name)
        self.drafter.end(self.asker.names - self.requests.keys())
        self.drafter.follow(rows)
        names, drafts = self.drafter.take()
        for name, tokens in zip(names, drafts, strict=True):
            if name in self.requests:
                self.requests[name].drafts = tokens
        self.steps.append(self.clock.now - start)

    def run(self, max_steps: int = 10_000) -> None:
        """Until no request is left."""
        while self.requests:
            self.step()
            assert len(self.steps) < max_steps


def worker(clock: Clock, alpha: float = 1.0, **limits: float) -> DraftWorker:
    """A worker with an oracle."""
    return DraftWorker(Oracle(alpha), Limits(**limits), clock)  # type: ignore[arg-type]
