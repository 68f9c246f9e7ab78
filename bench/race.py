"""Contestants on the same workloads, taking turns, so that machine drift hits all alike."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.client import Client
from bench.context import progress
from bench.measure import (
    AUTOREGRESSIVE,
    REFERENCE,
    Circumstances,
    GateError,
    Measurement,
    measurement,
    response_problems,
    seed_problems,
    without_speed,
)
from bench.reference import answer_questions
from bench.servers import Server
from bench.workloads import (
    ANSWER_TOKENS,
    FIXED,
    ONE_BLOCK,
    QUESTIONS,
    Shape,
    Workload,
    accuracy_problem,
    draw_questions,
    write_questions,
)
from dllm.tasks.suite import Question


@dataclass(frozen=True)
class Contestant:
    """What is measured against others.

    Attributes:
        name: as it appears in tables.
        model: the checkpoint's folder.
        commits: how its passes are counted (``measure``).
        server: None for Hugging Face's ``generate``, which is called in a process of its own.
        generation: folder of its generation_config.json, for that one.
        client_flags: of ``vllm bench serve``, beside those of the workload.
        takes_seeds: whether the gate may send one.
        expected: share of right answers on the adaptive schedule; None where nobody knows.
    """

    name: str
    model: Path
    commits: int
    server: Server | None = None
    generation: Path | None = None
    client_flags: tuple[str, ...] = ()
    takes_seeds: bool = True
    expected: float | None = None

    def takes(self, workload: Workload) -> bool:
        """Whether a workload has a meaning for this contestant."""
        if self.name == AUTOREGRESSIVE:
            return workload.schedule != FIXED  # it has no denoise steps to fix
        if self.name == REFERENCE:
            return workload.prompts == QUESTIONS and workload.concurrency == 1
        return True


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


def in_turn(contestants: Sequence[Contestant], pair: int) -> list[Contestant]:
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

    def run(self) -> list[tuple[Workload, Measurement]]:
        """All rounds; in each, every workload, and in each of those every contestant.

        Raises:
            RuntimeError: a server or client failed.
        """
        measured = []
        for pair in rounds(self.rounds, self.budget_s):
            for workload in self.workloads:
                progress(f"  round {pair + 1} of {self.rounds}: {workload.name}")
                measured += [(workload, one) for one in self._round(workload, pair)]
        return withhold(measured, {one.name: one.expected for one in self.contestants})

    def _round(self, workload: Workload, pair: int) -> list[Measurement]:
        """Every contestant once, starting with another in each round."""
        ordered = in_turn([one for one in self.contestants if one.takes(workload)], pair)
        asked: list[Question] = []
        dataset = self.client.folder / f"questions-{pair}.json"
        if workload.prompts == QUESTIONS:
            seed = self._seed(workload, pair)
            asked = draw_questions(workload.num_requests, seed, ONE_BLOCK)
            write_questions(asked, dataset)
        return [
            self._once(contestant, workload, asked, dataset, pair, position)
            for position, contestant in enumerate(ordered)
        ]

    def _seed(self, workload: Workload, pair: int) -> int:
        """Of a workload's prompts and arrival times in a round.

        No two share one: answers to a repeated question would not be independent, and the second
        time a part of it might be found in a cache.
        """
        return pair * len(self.workloads) + self.workloads.index(workload)

    def _once(
        self,
        contestant: Contestant,
        workload: Workload,
        asked: list[Question],
        dataset: Path,
        pair: int,
        position: int,
    ) -> Measurement:
        """One run."""
        name = f"{contestant.name}-{workload.name}-{pair}".replace(" ", "_").replace("/", "_")
        server = contestant.server
        others = {one.server for one in self.contestants if one.server} - {server}
        start, idle_before = time.monotonic(), sum(other.cpu_seconds() for other in others)
        with undisturbed(server, self.contestants):
            if server is None:
                saved = self.client.call(
                    name,
                    answer_questions,
                    contestant.model,
                    contestant.generation,
                    asked,
                    ANSWER_TOKENS,
                    self.client.folder / f"{name}.json",
                )
                peak = saved["peak_memory_mib"]
            else:
                server.reset_peak_memory()
                seed = self._seed(workload, pair)
                flags = [*workload.client_flags(seed, dataset), *contestant.client_flags]
                saved = self.client.bench_serve(name, server.url, str(contestant.model), flags)
                peak = server.peak_memory_mib()
        idle = sum(other.cpu_seconds() for other in others) - idle_before
        idle_percent = 100 * idle / (time.monotonic() - start)
        about = Circumstances(contestant.name, pair, position, peak, idle_percent)
        expected = None if workload.schedule == FIXED else contestant.expected
        return measurement(about, contestant.commits, saved, workload, asked, expected)


def withhold(
    measured: Sequence[tuple[Workload, Measurement]], expected: dict[str, float | None]
) -> list[tuple[Workload, Measurement]]:
    """The same, without the speeds of contestants whose answers, taken together, are too bad.

    One run has few answers and a wide bound; all runs of a schedule have many.
    """
    tallies: dict[tuple[str, str], tuple[int, int]] = {}
    for workload, one in measured:
        if one.num_correct is not None and workload.schedule != FIXED:
            key = (workload.schedule, one.contestant)
            correct, asked = tallies.get(key, (0, 0))
            tallies[key] = correct + one.num_correct, asked + one.num_requests
    problems = {
        key: accuracy_problem(correct, asked, expected.get(key[1]))
        for key, (correct, asked) in tallies.items()
    }
    result = []
    for workload, one in measured:
        problem = problems.get((workload.schedule, one.contestant), "")
        if problem and not one.problem:
            one = without_speed(one, f"all runs together: {problem}")
        result.append((workload, one))
    return result


def admit(contestant: Contestant, shape: Shape) -> float:
    """Let a server through the gate; returns the seconds its first request took.

    Raises:
        GateError: an answer has the wrong length, or two equal seeded requests differ.
    """
    server, name = contestant.server, contestant.name
    assert server is not None
    body = {
        "prompt": [20 + position % 100 for position in range(shape.input_len)],
        "max_tokens": shape.output_len,
        "ignore_eos": True,
    }
    responses = [server.complete(**body)]
    if contestant.takes_seeds:
        responses += [server.complete(**body, seed=1), server.complete(**body, seed=1)]
    problems = response_problems(name, responses, shape.output_len)
    if contestant.takes_seeds and not problems:
        problems += seed_problems(name, *responses[1:])
    if problems:
        raise GateError("\n".join(problems))
    return responses[0].seconds


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


def start_all(servers: Sequence[Server], stack: ExitStack) -> None:
    """Start servers side by side and wait for all; the stack stops them.

    Raises:
        RuntimeError: one is not ready.
    """
    for server in servers:
        stack.enter_context(server)
        server.start()
    for server in servers:
        server.wait_until_ready()
