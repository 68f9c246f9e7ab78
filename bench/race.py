"""Contestants on the same workloads, taking turns, so that machine drift hits all alike."""

import argparse
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.context import GateError, Row, progress
from bench.runs import FIXED, SPEEDS, Shape, Workload, bench_serve, figures
from bench.servers import SERVE_FLAGS, Server
from bench.toys.evaluate import wilson_interval
from bench.toys.suite import Question
from dllm.settings.command import positive

T = TypeVar("T")
LEEWAY = 0.02  # share of right answers by which models of the same questions may differ


@dataclass(frozen=True)
class Contestant:
    name: str
    server: Server | None = None  # None for what runs without one
    commits: str = ""  # how its passes are counted (``runs``)
    client_flags: tuple[str, ...] = ()  # of ``vllm bench serve``, beside those of the workload
    takes_seeds: bool = True
    # Without a server: answers questions, so many at once; what ``runs.figures`` reads.
    answer: Callable[[Sequence[Question], int], dict[str, Any]] | None = None
    one_by_one: bool = False  # it takes no more at once

    def takes(self, load: Any) -> bool:
        return not self.one_by_one or load.concurrency == 1


def add_options(
    parser: argparse.ArgumentParser,
    rounds: int,
    minutes: float,
    num_requests: int,
    concurrency: Sequence[int],
) -> None:
    add = parser.add_argument
    add("--rounds", type=positive, default=rounds)
    add("--minutes", type=float, default=minutes, help="no round begins that ends later")
    add("--num-requests", type=int, default=num_requests, help="of a run, at least")
    add("--concurrency", type=int, nargs="*", default=concurrency)
    given, text = list(SERVE_FLAGS), "of all servers, in one string"
    add("--serve-flags", type=shlex.split, default=given, help=text)


def race(
    contestants: Sequence[Contestant],
    loads: Sequence[T],
    rounds: Iterable[int],
    run: Callable[[Contestant, T, int], Row],
) -> Iterator[list[Row]]:
    """All rounds; in each, every load, and in each of those every contestant, alone.

    Yields all rows so far, after each load, so that they can be saved. A load that nobody takes is
    left out. ``run`` gets a number that belongs to this load in this round; its row gets the
    contestant and the round (``pair``). Raises RuntimeError: a server or client failed.
    """
    rows: list[Row] = []
    for pair in rounds:
        for index, load in enumerate(loads):
            name = getattr(load, "name", load)
            racing = [one for one in contestants if one.takes(load)]
            if not racing:
                progress(f"  round {pair + 1}: nobody takes {name}; it is left out")
                continue
            progress(f"  round {pair + 1}: {name}")
            shift = pair % len(racing)  # each round begins with another one
            for one in racing[shift:] + racing[:shift]:
                with undisturbed(one.server, contestants):
                    row = run(one, load, pair * len(loads) + index)
                rows.append({"contestant": one.name, "pair": pair, **row})
            yield rows


def rounds(count: int, budget_s: float = float("inf")) -> Iterator[int]:
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


def race_workloads(
    contestants: Sequence[Contestant],
    workloads: Sequence[Workload],
    rounds: Iterable[int],
) -> Iterator[list[Row]]:
    """``race`` on workloads; whoever is right too rarely has no speed (``withhold``)."""
    return map(withhold, race(contestants, workloads, rounds, run_workload))


def run_workload(contestant: Contestant, workload: Workload, seed: int) -> Row:
    """No two workloads or rounds share a ``seed``, which is of prompts and arrival times.

    Answers to a repeated question would not be independent, and might be found in a cache.
    """
    asked = workload.asked(seed)
    server = contestant.server
    if server is None:
        assert contestant.answer is not None
        saved = contestant.answer(asked, workload.concurrency or 1)
    else:
        before = server.counters()
        with tempfile.TemporaryDirectory(prefix="dllm-bench-") as folder:
            flags = workload.client_flags(seed, Path(folder) / "questions.jsonl")
            saved = bench_serve(server.url, server.model, [*flags, *contestant.client_flags])
        after = server.counters()
        saved |= {key: value - before.get(key, 0) for key, value in after.items()}
    return {
        "schedule": workload.schedule,
        "concurrency": workload.concurrency,
        "rate": workload.rate,
        "canvas_length": workload.shape.canvas_length,
        "family": workload.family if workload.schedule != FIXED else None,
        **figures(contestant.commits, saved, workload, asked),
    }


def withhold(rows: Sequence[Row]) -> list[Row]:
    """The rows, without the speeds of contestants that are right less often than the best one.

    All answer the same questions. So far fewer right answers than the best one's, beyond chance
    (95% intervals) and LEEWAY, are a mistake, and so is none at all.
    """
    shares: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        asked = [r for r in rows if r["contestant"] == name and r["num_correct"] is not None]
        if asked:
            right, count = (sum(r[key] for r in asked) for key in ("num_correct", "num_requests"))
            shares[name] = wilson_interval(right, count) if right else (0.0, 0.0)
    best = max((low for low, _ in shares.values()), default=0.0)
    result = []
    for row in rows:
        low, high = shares.get(row["contestant"], (1.0, 1.0))
        if not row["problem"] and (high == 0 or high + LEEWAY < best):
            wrong = f"{low:.1%} .. {high:.1%} of answers are right, of the best one's {best:.1%}"
            row = {**row, **dict.fromkeys(SPEEDS), "problem": wrong}
        result.append(row)
    return result


def start_all(
    contestants: Sequence[Contestant], admit: Callable[[Contestant], None], stack: ExitStack
) -> None:
    """Start the servers, one after the other, and admit each; the stack stops them."""
    served = [one for one in contestants if one.server]
    for index, one in enumerate(served):
        progress(f"starting {one.name}")
        with undisturbed(None, served[:index]):
            assert one.server is not None
            stack.enter_context(one.server)
            admit(one)


def admit(contestant: Contestant, shape: Shape, at_once: int = 1) -> None:
    """Wait until a server is ready, and check its answers before anything is timed.

    Then sends ``at_once`` requests together, the largest batch that it will see: a server that
    compiles for a batch when it first sees one does so here. Raises GateError: an answer has the
    wrong length, or two equal seeded requests differ.
    """
    server = contestant.server
    assert server is not None
    server.wait_until_ready()

    prompt = {"prompt": shape.prompt, "max_tokens": shape.output_len, "ignore_eos": True}

    def ask(count: int = 1, **more: Any) -> list[list[int]]:
        body = {**prompt, **more, "return_token_ids": True}
        with ThreadPoolExecutor(count) as senders:
            replies = senders.map(lambda _: server.post("/v1/completions", **body), range(count))
            found = [reply["choices"][0]["token_ids"] for reply in replies]
        if bad := [len(tokens) for tokens in found if len(tokens) != shape.output_len]:
            raise GateError(f"{contestant.name}: {bad} tokens instead of {shape.output_len}")
        return found

    ask()
    if contestant.takes_seeds and ask(seed=1) != ask(seed=1):
        raise GateError(f"{contestant.name}: two equal requests with a seed have other tokens")
    ask(at_once)
