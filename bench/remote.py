"""Remote drafts beside plain decoding: draft workers in processes of their own, over Unix sockets.

    python -m bench.remote [--rounds 5] [--requests 24] [--at-once 1 4] [--drafts 8]

One engine with tiny-ar as the target; what drafts for it changes. Draft workers are tiny-ar itself
(so that nearly all drafts are right, and a draft costs what a step of the target costs), with and
without running ahead; tiny-dllm, whose canvas is one block of drafts; and one that knows the
answers and takes 0.5 ms for a draft, as a much smaller model would. Beside them no drafts. In two
of the runs the worker hangs, or is killed, when half of the requests are answered. In each round
all take turns on the same held-out questions, greedily; answers that differ from those without
drafts end the benchmark.

Writes one row a run: tokens/s, tokens per step and request, milliseconds waited per step and at
most, and the share of steps with drafts that waited for less than 0.1 ms.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.context import (
    ROOT,
    GateError,
    Rows,
    as_text,
    command_line,
    progress,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.race import in_turn, rounds
from bench.tables import Table, markdown, middle, names_of, of, ratios, section
from dllm.drafter.widths.adaptive import AdaptiveWidth
from dllm.drafter.widths.policy import FixedWidth
from dllm.patches.remote import SPECULATOR
from dllm.remote.address import parse
from dllm.remote.client import Link, wait
from dllm.remote.stream import dialer
from dllm.remote.wire import reply_bytes
from dllm.tasks.suite import questions

FILE = "remote.csv"
TARGET = ROOT / "checkpoints/tiny-ar"
DIFFUSION = ROOT / "checkpoints/tiny-dllm"
FAMILIES = ("schema", "extract", "report")
MAX_TOKENS, DEADLINE_MS = 64, 50.0
NO_WAIT_S = 1e-4
PLAIN = "no drafts"
AR, AHEAD, CANVAS = "tiny-ar", "tiny-ar, ahead", "tiny-dllm"
KNOWN, KNOWN_AHEAD = "known", "known, ahead"
HUNG, KILLED = "hangs", "killed"
SIGNALS = {HUNG: signal.SIGSTOP, KILLED: signal.SIGKILL}
ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=512)
MEMORY = 64 << 20
BUDGET_S = 3000
NUMBERS = itertools.count()


class Contestant(NamedTuple):
    """Who drafts.

    Attributes:
        worker: AR, AHEAD, CANVAS, KNOWN or KNOWN_AHEAD; None without a worker.
        width: drafts of a request and step; None for the policy ``adaptive``.
        accident: HUNG or KILLED: what happens to the worker on the way.
    """

    name: str
    worker: str | None
    width: int | None
    accident: str | None = None


def contestants(num_drafts: int) -> list[Contestant]:
    """All of them."""
    widths = max(1, num_drafts // 4), num_drafts
    fixed = [(worker, n) for worker in (AR, AHEAD, KNOWN, KNOWN_AHEAD) for n in widths]
    late = f"{KNOWN_AHEAD}, adaptive"
    return [
        Contestant(PLAIN, None, 0),
        *(Contestant(f"{who}, K = {n}", who, n) for who, n in [*fixed, (CANVAS, num_drafts)]),
        *(Contestant(f"{who}, adaptive", who, None) for who in (AR, CANVAS, KNOWN_AHEAD)),
        *(Contestant(f"{late}, {end}", KNOWN_AHEAD, None, accident=end) for end in SIGNALS),
    ]


def command(worker: str, num_drafts: int, texts: Path) -> list[str]:
    """Starts a worker; one that runs ahead does so as far as the drafts of one more step.

    Args:
        texts: prompts with their answers, as JSON; the sockets are beside it.
    """
    ahead = str(num_drafts + 1 if worker in (AHEAD, KNOWN_AHEAD) else 0)
    if worker in (KNOWN, KNOWN_AHEAD):
        socket = str(texts.with_name(f"known-{ahead}-{next(NUMBERS)}.sock"))
        return [sys.executable, "-m", "bench.known_drafts", socket, str(texts), ahead]
    given = ["--model", str(TARGET), "--ahead", ahead]
    if worker == CANVAS:
        given = ["--model", str(DIFFUSION), "--canvas", "16"]
    given += ["--listen", str(texts.with_name("*.sock")), "--dtype", "float32", "--enforce-eager"]
    given += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(MEMORY)]
    return [sys.executable, "-m", "dllm.cli", "draft-worker", *given]


class Worker:
    """A process that drafts.

    Raises:
        RuntimeError: it ended before it was ready.
    """

    def __init__(self, given: Sequence[str], log: Path) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                given, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("dllm draft-worker:"):
                self.address = line.split()[-1]
                return
        raise RuntimeError(f"no draft worker:\n{log.read_text(errors='replace')[-2000:]}")

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def _environment() -> dict[str, str]:
    """One thread, eager, quiet; for the workers, and for this process."""
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def prompts(count: int) -> list[list[int]]:
    """Token ids of held-out questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    asked = questions(FAMILIES, "heldout", -(-count // len(FAMILIES)))[:count]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each.prompt}], tokenize=False, add_generation_prompt=True
        )
        for each in asked
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


class Target:
    """The target's engine, in this process, and what a run of it costs."""

    def __init__(self, num_drafts: int, max_num_seqs: int) -> None:
        os.environ.update(_environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        torch.set_num_threads(1)
        from vllm import LLM

        speculative = {"method": "custom_class", "model": SPECULATOR}
        remote = {"workers": ["/nowhere/worker.sock"], "deadline_ms": DEADLINE_MS}
        self.llm = LLM(
            str(TARGET),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            disable_log_stats=True,
            kv_cache_memory_bytes=MEMORY,
            speculative_config=speculative | {"num_speculative_tokens": num_drafts},
            additional_config={"dllm": {"remote": remote}},
            **ENGINE,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.drafter = core.engine_core.scheduler.remote
        self._num_drafts, self._max_num_seqs = num_drafts, max_num_seqs
        self._policies: dict[str, AdaptiveWidth] = {}
        self.waits: list[float] = []  # seconds, of each step of a run that asked
        collect = self.drafter.client.collect

        def timed(*given: Any) -> float:
            self.waits.append(collect(*given))
            return self.waits[-1]

        self.drafter.client.collect = timed

    @contextmanager
    def drafted_by(self, contestant: Contestant, address: str | None) -> Iterator[None]:
        """Let a contestant draft. Each has a policy of its own, which keeps what it has learned."""
        drafter, width = self.drafter, contestant.width
        drafter.policy = FixedWidth(self._num_drafts, width)
        if width is None:
            new = AdaptiveWidth(self._num_drafts, self._max_num_seqs, reads_confidence=False)
            drafter.policy = self._policies.setdefault(contestant.name, new)
            drafter.policy.leave_untimed()  # the time since its last run
        drafter._wants_drafts = width != 0
        links = []
        if address is not None:
            dial = dialer(parse(address, None, "worker"), None, reply_bytes(self._max_num_seqs))
            links.append(Link(address, dial, 1e-3 * DEADLINE_MS, drafter.counts))
        drafter.client.use(links)
        while not all(link.is_up for link in links):
            wait(links, 0.1)
            links[0].receive()
        yield
        drafter.client.end(drafter.client.names)
        drafter.client.use([])

    def run(
        self, asked: Sequence[list[int]], at_once: int, accident: Callable[[], None] | None = None
    ) -> tuple[list[list[int]], dict[str, float]]:
        """The answers to all prompts, so many at once, and the figures.

        Args:
            accident: called when half of them are answered.
        """
        from vllm import SamplingParams

        engine: Any = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
        answers: dict[int, list[int]] = {}
        num_begun = num_steps = num_rows = 0
        self.waits.clear()
        start = time.perf_counter()
        while len(answers) < len(asked):
            while num_begun < min(len(asked), len(answers) + at_once):
                given = {"prompt_token_ids": asked[num_begun]}
                engine.add_request(str(num_begun), given, params)
                num_begun += 1
            num_rows, num_steps = num_rows + num_begun - len(answers), num_steps + 1
            done = [output for output in engine.step() if output.finished]
            answers |= {int(each.request_id): list(each.outputs[0].token_ids) for each in done}
            if accident is not None and len(answers) >= len(asked) // 2:
                accident()
                accident = None
        seconds = time.perf_counter() - start
        num_tokens, waits = sum(map(len, answers.values())), self.waits
        figures = {
            "tokens_per_s": num_tokens / seconds,
            "tokens_per_step": num_tokens / num_rows,
            "waited_ms": 1e3 * sum(waits) / num_steps,
            "longest_wait_ms": 1e3 * max(waits, default=0.0),
            "no_wait": sum(each < NO_WAIT_S for each in waits) / max(1, len(waits)),
        }
        return [answers[number] for number in range(len(asked))], figures


class Race:
    """A target, the workers, and the questions.

    Args:
        start: starts a worker, which knows these texts; whoever calls ends it.
    """

    def __init__(
        self,
        target: Target,
        start: Callable[[str, list[list[int]]], Worker],
        asked: Sequence[list[int]],
    ) -> None:
        self._target, self._start, self._asked = target, start, asked
        self._workers: dict[str, Worker] = {}
        with target.drafted_by(Contestant(PLAIN, None, 0), None):
            self._expected, _ = target.run(asked, 1)

    def _worker(self, name: str, is_new: bool) -> Worker:
        known = zip(self._asked, self._expected, strict=True)
        texts = [prompt + answer for prompt, answer in known]
        if is_new:
            return self._start(name, texts)
        if name not in self._workers:
            self._workers[name] = self._start(name, texts)
        return self._workers[name]

    def once(self, contestant: Contestant, at_once: int) -> dict[str, float]:
        """One run's figures.

        Raises:
            GateError: the answers are not those of plain decoding.
            RuntimeError: the worker has ended.
        """
        name, accident = contestant.worker, contestant.accident
        worker = None if name is None else self._worker(name, accident == KILLED)
        if worker is not None and worker.process.poll() is not None:
            raise RuntimeError(f"{contestant.name}: its draft worker has ended")

        def happens() -> None:
            if worker is not None and accident is not None:
                worker.process.send_signal(SIGNALS[accident])

        address = None if worker is None else worker.address
        with self._target.drafted_by(contestant, address):
            answers, figures = self._target.run(self._asked, at_once, happens)
        if worker is not None and accident == HUNG:
            worker.process.send_signal(signal.SIGCONT)
        if answers != self._expected:
            raise GateError(f"{contestant.name}: answers differ from plain decoding's")
        return figures


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafts", type=int, default=8, help="K, the most drafts of a request")
    given = parser.parse_args(arguments)
    about = provenance("bench.remote")
    everyone = contestants(given.drafts)
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, known: list[list[int]]) -> Worker:
            texts = logs / "texts.json"
            texts.write_text(json.dumps(known))
            worker = Worker(command(name, given.drafts, texts), logs / f"{name}.log")
            stack.callback(worker.end)
            return worker

        target = Target(given.drafts, max(given.at_once))
        race = Race(target, start, prompts(given.requests))
        for at_once in given.at_once:  # starts and loads what is needed
            for each in everyone:
                if each.accident is None:
                    race.once(each, at_once)
        for pair in rounds(given.rounds, BUDGET_S):
            for at_once in given.at_once:
                for each in in_turn(everyone, pair):
                    run = {"contestant": each.name, "concurrency": at_once, "pair": pair}
                    rows.append(run | race.once(each, at_once))
                    progress(f"round {pair + 1} of {given.rounds}: {each.name}")
    write_csv(given.results / FILE, [row | about for row in rows])
    print(markdown(table(as_text(rows))))
    return 0


# --- table ---------------------------------------------------------------------------------------


COLUMNS = (
    ("tokens_per_step", "tokens a step and request", 2),
    ("waited_ms", "ms waited a step", 2),
    ("longest_wait_ms", "longest wait, ms", 0),
    ("no_wait", "steps that did not wait", 2),
)


def table(rows: Rows) -> Table:
    """One line a load and contestant."""
    lines = []
    for load, name in itertools.product(
        dict.fromkeys(row["concurrency"] for row in rows), names_of(rows)
    ):
        here = [row for row in rows if row["concurrency"] == load]
        own, plain = of(here, name), of(here, PLAIN)
        figures = [middle(own, column, decimals) for column, _, decimals in COLUMNS]
        lines.append([f"{load} at once", name, ratios(own, plain, "tokens_per_s"), *figures])
    header = ["", "drafts", f"tokens/s, ratio to {PLAIN}"]
    return [*header, *(title for _, title, _ in COLUMNS)], lines


def remote(results: Path) -> str:
    """Section of docs/remote.md: speed."""
    return section(results / FILE, "python -m bench.remote", lambda rows: markdown(table(rows)))


if __name__ == "__main__":
    sys.exit(main())
