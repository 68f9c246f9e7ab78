"""Draft workers without a model, networks without sockets, and a target that is a function.

All of them share a clock that only moves when somebody waits, so that tests of deadlines are exact
and take no time.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dllm.drafter.widths.driver import WidthDriver
from dllm.drafter.widths.policy import FixedWidth, WidthPolicy
from dllm.engine.metrics import Counts
from dllm.remote.client import Client, DraftRequest
from dllm.remote.link import Link
from dllm.remote.scheduler import RemoteDrafter
from dllm.remote.wire import GREETING, DraftBatch, frame, read_batch
from dllm.remote.worker import DraftWorker
from tests.support.clock import Clock
from tests.support.oracle import VOCAB, Oracle, truth

TICK_S = 1e-4


class Net:
    """A worker behind a network that delays, in place of a ``stream.Stream``.

    Args:
        delay_s, jitter_s: one way; no message overtakes another.
        full: share of the batches that are not sent, because those before are not on their way.
        draft_s: a step of the worker's engine.
        is_near: the worker is on the target's machine.
    """

    def __init__(
        self,
        worker: DraftWorker,
        clock: Clock,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        full: float = 0.0,
        draft_s: float = TICK_S,
        address: str = "unix:///1",
        is_near: bool = False,
    ) -> None:
        self.address, self.worker, self.clock = address, worker, clock
        self.delay_s, self.jitter_s, self.full, self.draft_s = delay_s, jitter_s, full, draft_s
        self.is_open = self.is_there = True
        self.is_hung, self.is_near = False, is_near
        self.error = ConnectionAbortedError("the worker is gone")
        self._random, self._drafted_at = random.Random(1), 0.0
        self._out: list[tuple[float, bytes]] = []
        self._back: list[tuple[float, bytes]] = []
        self.sent: list[DraftBatch] = []
        self.peer = 0

    def dial(self) -> "Net":
        """A new connection, on which the worker's greeting is there at once."""
        if not self.is_there:
            raise ConnectionRefusedError("nobody listens")
        self.is_open = True
        self.peer += 1
        self._back.append((self.clock.now, frame(GREETING)[4:]))
        return self

    def send(self, data: bytes) -> bool:
        if not self.is_open or self._random.random() < self.full:
            return False
        self.sent.append(read_batch(data[4:]))
        self._post(self._out, data[4:])
        return True

    def _post(self, way: list[tuple[float, bytes]], data: bytes) -> None:
        due = self.clock.now + self.delay_s + self._random.random() * self.jitter_s
        way.append((max([due, *(time for time, _ in way[-1:])]), data))

    def _due(self, way: list[tuple[float, bytes]]) -> list[bytes]:
        due = [data for time, data in way if time <= self.clock.now]
        del way[: len(due)]
        return due

    def turn(self) -> None:
        if self.is_hung or not self.is_open:
            return
        for data in self._due(self._out):
            self.worker.hear(self.peer, read_batch(data))
        if self.clock.now >= self._drafted_at + self.draft_s:
            self._drafted_at = self.clock.now
            self.worker.draft()
        for peer, reply in self.worker.replies():
            if peer == self.peer:
                self._post(self._back, frame(reply)[4:])

    @property
    def has_news(self) -> bool:
        return any(time <= self.clock.now for time, _ in self._back)

    def read(self) -> list[bytes]:
        self.turn()
        return self._due(self._back)

    def close(self) -> None:
        self.is_open = False
        self._out.clear()
        self._back.clear()
        self.worker.leave(self.peer)

    def kill(self) -> None:
        self.is_there = False
        self.close()

    def restart(self, worker: DraftWorker) -> None:
        """Another process at the same address."""
        self.worker, self.is_there = worker, True


def link_to(net: Net, deadline_s: float, counts: Counts | None = None) -> Link:
    """A target's link to a worker, which is up."""
    link = Link(
        net.address, net.dial, deadline_s, Counts() if counts is None else counts, net.clock
    )
    for _ in range(2):
        link.receive()
    assert link.is_up
    return link


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
        num_slots: int = 8,
        per_draft_s: float = 0.0,
    ) -> None:
        self.nets, self.clock, self.num_drafts = nets, clock, num_drafts
        self.step_s, self.per_draft_s = step_s, per_draft_s
        self.counts = Counts()
        self.links = [link_to(net, deadline_s, self.counts) for net in nets]
        self.client = Client(self.links, VOCAB, self.counts, clock, self._wait)
        policy = policy or FixedWidth(num_drafts)
        driver = WidthDriver(policy, num_slots, self.counts)
        self.drafter = RemoteDrafter(self.client, driver, deadline_s)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self.steps: list[float] = []
        self.widths: list[int] = []

    def _wait(self, streams: Sequence[Any], seconds: float) -> None:
        """What the client waits with: the clock moves until there is news."""
        self._pass(self.clock.now + seconds, ends_with_news=True)

    def _pass(self, end: float, ends_with_news: bool = False) -> None:
        """Let the workers do what they do until this time."""
        while self.clock.now < end:
            for net in self.nets:
                net.turn()
            if ends_with_news and any(net.has_news for net in self.nets):
                return
            self.clock.now += min(TICK_S, end - self.clock.now)

    def count(self, what: str, worker: int = 0) -> float:
        """What ``remote_WHAT`` of one of the workers says."""
        return self.counts.get((f"remote_{what}", self.nets[worker].address), 0)

    def add(self, name: str, prompt: list[int], num_tokens: int) -> None:
        """A request; its prompt is read in the next step."""
        self.requests[name] = Request(list(prompt), len(prompt) + num_tokens)
        self.drafter.admit({name: self.requests[name].tokens})

    def abort(self, name: str) -> None:
        del self.requests[name]

    def step(self, count: int = 1) -> None:
        """So many steps of all requests, each with the drafts of the next one."""
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        start = self.clock.now
        verified = {name: len(each.drafts) for name, each in self.requests.items()}
        self.widths.append(sum(verified.values()))
        end = start + self.step_s + self.per_draft_s * sum(verified.values())
        self._pass(end)
        names = list(self.requests)
        in_prompt = np.array([each.num_steps == 0 for each in self.requests.values()])
        requests, sampled = {}, []
        for name, request in list(self.requests.items()):
            request.num_steps += 1
            before = len(request.tokens)
            for draft in [*request.drafts, None]:
                own = truth(request.tokens)
                request.tokens.append(own)
                if own != draft or len(request.tokens) == request.end:
                    break
            is_over = len(request.tokens) >= request.end
            limit = 0 if is_over else min(self.num_drafts, request.end - len(request.tokens) - 1)
            sampled.append(len(request.tokens) - before)
            requests[name] = DraftRequest(request.tokens, limit)
            if is_over:
                self.finished[name] = self.requests.pop(name)
        self.client.keep(self.requests)
        num_verified = np.array([verified[name] for name in names], dtype=np.int64)
        accepted = np.clip(np.array(sampled, dtype=np.int64) - 1, 0, num_verified)
        self.drafter.follow(requests, in_prompt, num_verified, accepted)
        names, drafts = self.drafter.take()
        for name, tokens in zip(names, drafts, strict=True):
            if name in self.requests:
                self.requests[name].drafts = tokens
        self.steps.append(self.clock.now - start)

    def run(self, max_steps: int = 10_000) -> None:
        while self.requests:
            self.step()
            assert len(self.steps) < max_steps


def worker(clock: Clock, alpha: float = 1.0, ahead: int = 0) -> DraftWorker:
    """A worker with an oracle."""
    return DraftWorker(Oracle(alpha), ahead, clock)


def simulated(
    alpha: float = 1.0, ahead: int = 0, between: Mapping[str, float] | None = None, **options: Any
) -> tuple[Target, Net]:
    """A target that asks one worker, and what is between them.

    Args:
        between: of ``Net``.
        options: of ``Target``; its policy may be a function that makes one of the clock.
    """
    clock = Clock()
    net = Net(worker(clock, alpha, ahead), clock, **(between or {}))
    if callable(policy := options.get("policy")):
        options["policy"] = policy(clock)
    return Target([net], clock, **options), net
