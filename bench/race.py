"""Contestants on the same workloads, taking turns, so that machine drift hits all alike."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.client import Answering, Client, answer_questions
from bench.context import GateError, progress
from bench.measure import Measurement, measurement, without_speed
from bench.servers import Server, tail
from bench.workloads import (
    ADAPTIVE,
    ANSWER_TOKENS,
    Shape,
    Workload,
    accuracy_problem,
    draw_questions,
    write_questions,
)
from dllm.tasks.suite import Question

T = TypeVar("T")
Measured = list[tuple[Workload, Measurement]]


@dataclass(frozen=True)
class Contestant:
    """What is measured against others.

    Attributes:
        name: as it appears in tables.
        model: the checkpoint's folder.
        commits: how its passes are counted (``measure``).
        server: None for what runs without one.
        local: that answers questions in a process of its own (``client.answer_questions``).
        client_flags: of ``vllm bench serve``, beside those of the workload.
        takes_seeds: whether a request may have one.
        expected: share of right answers on the adaptive schedule; None where nobody knows.
    """

    name: str
    model: Path
    commits: int
    server: Server | None = None
    client_flags: tuple[str, ...] = ()
    takes_seeds: bool = True
    expected: float | None = None
    local: Answering = answer_questions

    def takes(self, workload: Workload) -> bool:
        """What runs without a server answers one question after the other."""
        return self.server is not None or workload.concurrency == 1


def rounds(count: int, budget_s: float) -> Iterator[int]:
    """0 .. count - 1, less those that would end more than ``budget_s`` seconds after the first.

    Judged by the pace of those before; the first always takes place.
    """
    start = time.monotonic()
    for pair in range(count):
        used = time.monotonic() - start
        if pair and used * (pair + 1) / pair > budget_s:
            progress(f"  {pair} of {count} rounds fit into {budget_s:.0f} s")
            return
        yield pair


def in_turn(contestants: Sequence[T], pair: int) -> list[T]:
    """In the order of this round: each begins with another."""
    shift = pair % len(contestants)
    return [*contestants[shift:], *contestants[:shift]]


@dataclass(frozen=True)
class Race:
    """Everything a measurement needs; ``budget_s`` as in ``rounds``."""

    contestants: Sequence[Contestant]
    workloads: Sequence[Workload]
    rounds: int
    client: Client
    budget_s: float = float("inf")

    def run(self, save: Callable[[Measured], None] = lambda measured: None) -> Measured:
        """All rounds; in each, every workload, and in each of those every contestant.

        Args:
            save: is given everything so far, after each workload, so that an interrupted race is
                not lost.

        Raises:
            RuntimeError: a server or client failed.
        """
        expected = {one.name: one.expected for one in self.contestants}
        measured: Measured = []
        for pair in rounds(self.rounds, self.budget_s):
            for workload in self.workloads:
                progress(f"  round {pair + 1} of {self.rounds}: {workload.name}")
                measured += [(workload, one) for one in self._round(workload, pair)]
                save(withhold(measured, expected))
        return withhold(measured, expected)

    def _round(self, workload: Workload, pair: int) -> list[Measurement]:
        """Every contestant once, starting with another in each round."""
        ordered = in_turn([one for one in self.contestants if one.takes(workload)], pair)
        asked: list[Question] = []
        if workload.schedule == ADAPTIVE:
            seed = self._seed(workload, pair)
            asked = draw_questions(workload.num_requests, seed, workload.families)
            write_questions(asked, self._dataset(pair))
        return [self._once(contestant, workload, asked, pair) for contestant in ordered]

    def _dataset(self, pair: int) -> Path:
        return self.client.folder / f"questions-{pair}.json"

    def _seed(self, workload: Workload, pair: int) -> int:
        """Of a workload's prompts and arrival times in a round.

        No two share one: answers to a repeated question would not be independent, and the second
        time a part of it might be found in a cache.
        """
        return pair * len(self.workloads) + self.workloads.index(workload)

    def _once(
        self, contestant: Contestant, workload: Workload, asked: list[Question], pair: int
    ) -> Measurement:
        """One run."""
        seed = self._seed(workload, pair)
        name = f"{re.sub(r'[^a-z]+', '_', contestant.name)}-{seed}"
        server, model = contestant.server, contestant.model
        with undisturbed(server, self.contestants):
            if server is None:
                saved = self.client.generate(name, contestant.local, model, asked, ANSWER_TOKENS)
            else:
                flags = workload.client_flags(seed, self._dataset(pair))
                flags += contestant.client_flags
                before = server.counters()
                saved = self.client.bench_serve(name, server.url, str(model), flags)
                after = server.counters()
                saved |= {key: value - before.get(key, 0) for key, value in after.items()}
        return measurement(contestant.name, pair, contestant.commits, saved, workload, asked)


def withhold(measured: Measured, expected: dict[str, float | None]) -> Measured:
    """The same, without the speeds of runs whose answers are too bad, alone or taken together.

    One run has few answers and a wide bound; all runs of a contestant together have many.
    """
    tallies: dict[str, tuple[int, int]] = {}
    for _, one in measured:
        if one.num_correct is not None:
            correct, asked = tallies.get(one.contestant, (0, 0))
            tallies[one.contestant] = correct + one.num_correct, asked + one.num_requests
    result = []
    for workload, one in measured:
        if one.num_correct is not None and not one.problem:
            share = expected.get(one.contestant)
            problem = accuracy_problem(one.num_correct, one.num_requests, share)
            if not problem and (wrong := accuracy_problem(*tallies[one.contestant], share)):
                problem = f"all runs together: {wrong}"
            one = without_speed(one, problem) if problem else one
        result.append((workload, one))
    return result


def admit(contestant: Contestant, shape: Shape, at_once: int = 1) -> None:
    """Check a server's answers before anything is timed.

    Then sends ``at_once`` requests together, the largest batch that it will see: a server that
    compiles for a batch when it first sees one does so here.

    Raises:
        GateError: an answer has the wrong length, or two equal seeded requests differ.
    """
    server, name = contestant.server, contestant.name
    assert server is not None
    body = {"prompt": shape.prompt, "max_tokens": shape.output_len, "ignore_eos": True}
    responses = [server.complete(**body)]
    if contestant.takes_seeds:
        responses += [server.complete(**body, seed=1), server.complete(**body, seed=1)]
    with ThreadPoolExecutor(at_once) as senders:
        batch = list(senders.map(lambda _: server.complete(**body), range(at_once)))
    problems = []
    for one in [*responses, *batch]:
        if one.status != 200:
            problems.append(f"{name}: HTTP {one.status} instead of 200: {one.error}")
        elif len(one.token_ids) != shape.output_len:
            problems.append(f"{name}: {len(one.token_ids)} tokens instead of {shape.output_len}")
    seeded = [one.token_ids for one in responses[1:]]
    if not problems and len(set(seeded)) > 1:
        num_equal = sum(a == b for a, b in zip(*seeded, strict=True))
        problems.append(f"{name}: two equal requests with a seed agree in {num_equal} tokens only")
    if any(one.status in (0, 500) for one in [*responses, *batch]):
        problems.append(tail(server.log))
    if problems:
        raise GateError("\n".join(dict.fromkeys(problems)))


@contextmanager
def undisturbed(server: Server | None, racing: Sequence[Contestant]) -> Iterator[None]:
    """While one of the racing servers (or none) is measured, the others stand still."""
    others = [one.server for one in racing if one.server and one.server is not server]
    try:
        for other in others:
            other.pause()
        yield
    finally:
        for other in others:
            other.resume()


def start_in_turn(
    contestants: Sequence[Contestant], shape: Shape, at_once: int, stack: ExitStack
) -> None:
    """As ``start_all``, one for each core at a time, while those before stand still."""
    together = os.cpu_count() or 1
    for index in range(0, len(contestants), together):
        with undisturbed(None, contestants[:index]):
            start_all(contestants[index : index + together], shape, at_once, stack)


def start_all(
    contestants: Sequence[Contestant], shape: Shape, at_once: int, stack: ExitStack
) -> None:
    """Start the contestants' servers side by side and admit each; the stack stops them.

    Raises:
        RuntimeError: one is not ready.
        GateError: one gives wrong answers.
    """
    progress(f"starting {[one.name for one in contestants]}")
    served = [(one, one.server) for one in contestants if one.server]
    for _, server in served:
        stack.enter_context(server)
        server.start()
    for _, server in served:
        server.wait_until_ready()
    for one, _ in served:
        admit(one, shape, at_once)
