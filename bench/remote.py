"""Remote drafts beside plain decoding: draft workers in processes of their own, over Unix sockets.

    python -m bench.remote [--rounds 5] [--num-requests 24] [--concurrency 1 4] [--drafts 8]

Servers of tiny-ar, for which others draft:

    no drafts          nobody
    known, K = N       a worker that knows the answers and takes 0.5 ms for a draft, as a much
                       smaller model would; N drafts in every step
    known, ahead, ...  likewise, running ahead while the target verifies; and with the policy
                       ``adaptive``, which is the default
    tiny-dllm, K = N   ``dllm draft-worker`` with this model, whose canvas is a block of drafts

They take turns as in ``bench.serve``, greedily. The known answers are those of the server without
drafts. Writes remote.csv, one row a run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.context import ROOT, Rows, command_line, publish, reporting_failures
from bench.drafter import SHAPE, TARGET, speculate
from bench.race import (
    Contestant,
    add_options,
    admit,
    race_workloads,
    rounds,
    start_all,
    undisturbed,
)
from bench.runs import ADAPTIVE, ANSWER_TOKENS, NO_CANVAS, Workload
from bench.servers import SERVE_FLAGS, Server, child_environment, tail
from bench.tables import Section, grouped, markdown, middle, of, problems, ratios
from dllm.patches.drafts import REMOTE_DRAFTS
from dllm.remote.address import Address
from dllm.remote.stream import Server as Listener
from dllm.remote.worker import DraftWorker

FAMILIES = ("schema", "extract", "report")
PLAIN = "no drafts"
KNOWN_AHEAD = "known, ahead"
MODEL = ROOT / "checkpoints/tiny-dllm"
WORKERS = ("known", KNOWN_AHEAD, MODEL.name)


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    add_options(parser, rounds=5, minutes=50, num_requests=24, concurrency=[1, 4])
    parser.add_argument("--drafts", type=int, default=8, help="K, the most drafts of a request")
    given = parser.parse_args(arguments)
    path = given.results / SECTION.file
    ready = partial(admit, shape=SHAPE, at_once=max(given.concurrency))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        plain, *others = racing = contestants(given, folder)
        start_all([plain], ready, stack)
        load = partial(Workload, ADAPTIVE, given.num_requests, SHAPE, families=FAMILIES)
        workloads = [load(concurrency=n) for n in given.concurrency]
        (folder / "texts.json").write_text(json.dumps(answers(plain, workloads, given.rounds)))
        for worker in WORKERS:
            command = worker_command(worker, given.drafts, folder)
            stack.enter_context(running(command, folder / f"worker {worker}"))
        with undisturbed(None, [plain]):
            start_all(others, ready, stack)
        turns = rounds(given.rounds, 60 * given.minutes)
        for rows in race_workloads(racing, workloads, turns):
            publish(path, rows)
    print(SECTION(given.results))
    return 0


def contestants(given: argparse.Namespace, folder: Path) -> list[Contestant]:
    """Plain decoding first; no server is started."""
    found: list[Contestant] = []

    def add(name: str, **options: Any) -> None:
        flags: tuple[str, ...] = (*given.serve_flags, "--enforce-eager")
        if options:
            drafts = speculate(given.drafts, {"method": "custom_class", "model": REMOTE_DRAFTS})
            chosen = json.dumps({"dllm": {"remote": options}})
            flags = (*flags, *drafts, "--additional-config", chosen)
        server = Server(name, str(TARGET), folder / f"{len(found)}.log", flags)
        found.append(Contestant(name, server, NO_CANVAS, takes_seeds=False))

    fixed = {"policy": "fixed", "width": given.drafts}
    add(PLAIN)
    for worker in WORKERS:
        sockets = [str(socket(worker, folder))]
        add(f"{worker}, K = {given.drafts}", workers=sockets, **fixed)
    add(f"{KNOWN_AHEAD}, adaptive", workers=[str(socket(KNOWN_AHEAD, folder))])
    return found


def answers(plain: Contestant, workloads: Sequence[Workload], num_rounds: int) -> list[list[int]]:
    """Token ids of every prompt of the race and its answer."""
    assert plain.server is not None
    found = []
    for seed in range(num_rounds * len(workloads)):
        for question in workloads[seed % len(workloads)].asked(seed):
            reply = plain.server.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": question.prompt}],
                max_tokens=ANSWER_TOKENS,
                return_token_ids=True,
            )
            found.append(reply["prompt_token_ids"] + reply["choices"][0]["token_ids"])
    return found


class KnownDrafts:
    """Drafts from a list of texts; nothing behind other tokens. A step takes ``step_s`` seconds."""

    vocab_size, max_len = 2**31, 2**20

    def __init__(self, texts: list[list[int]], step_s: float = 5e-4) -> None:
        self._step_s, self._texts = step_s, texts
        self._runs: dict[str, list[int]] = {}  # the tokens that a run has yet to write
        self._number = 0

    def start(self, tokens: list[int], count: int) -> str:
        found = next((text for text in self._texts if text[: len(tokens)] == tokens), tokens)
        known = found[len(tokens) : len(tokens) + count]
        self._number += 1
        self._runs[str(self._number)] = known + [0] * (count - len(known))
        return str(self._number)

    def stop(self, run: str) -> None:
        del self._runs[run]

    def step(self) -> list[tuple[str, list[int], bool]]:
        time.sleep(self._step_s)
        found = [(run, [left.pop(0)], not left) for run, left in self._runs.items()]
        self._runs = {run: left for run, left in self._runs.items() if left}
        return found


def serve_known(listen: str, texts: str, ahead: str) -> None:
    """Draft until the process is killed; prints the address as ``dllm draft-worker`` does.

    ``texts``: a JSON file with the token ids of prompts and their answers.
    """
    server = Listener(Address(listen))
    print(f"dllm draft-worker: known drafts at {server.address}", flush=True)
    drafts = KnownDrafts(json.loads(Path(texts).read_text()))
    DraftWorker(drafts, int(ahead)).serve(server, lambda: True)


def socket(worker: str, folder: Path) -> Path:
    return folder / f"{worker}.sock".replace(", ", "-")


def worker_command(worker: str, num_drafts: int, folder: Path) -> list[str]:
    """Starts a worker; one that runs ahead does so as far as the drafts of one more step."""
    if worker == MODEL.name:
        where = "--model", str(MODEL), "--listen", str(socket(worker, folder))
        return [sys.executable, "-m", "dllm.cli", "draft-worker", *where, *SERVE_FLAGS]
    begin = "import sys; from bench.remote import serve_known; serve_known(*sys.argv[1:])"
    ahead = num_drafts + 1 if worker == KNOWN_AHEAD else 0
    given = [str(socket(worker, folder)), str(folder / "texts.json"), str(ahead)]
    return [sys.executable, "-c", begin, *given]


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    """It is ready, while the context lasts. Raises RuntimeError: it ended before that."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=child_environment(), cwd=ROOT
        )
    try:
        while "dllm draft-worker:" not in log.read_text(errors="replace"):
            if process.poll() is not None:
                raise RuntimeError(f"no draft worker:\n{tail(log)}")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def table(rows: Rows) -> str:
    """One line a load and contestant; then what was wrong."""
    lines = []
    for (load,), here in grouped(rows, "concurrency").items():
        plain = of(here, PLAIN)
        for (name,), own in grouped(here, "contestant").items():
            steps = middle(own, "tokens_per_pass", 2)
            lines.append([f"{load} at once", name, ratios(own, plain, "tokens_per_s"), steps])
    header = ["", "drafts", f"tokens/s, ratio to {PLAIN}", "tokens a step and request"]
    return "\n\n".join([markdown(header, lines), *problems(rows)])


SECTION = Section("remote.csv", "python -m bench.remote", table)  # of docs/remote.md


if __name__ == "__main__":
    sys.exit(main())
