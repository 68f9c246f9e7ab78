"""Do the bundled models answer on this machine? Each in a server of its own, side by side.

    python -m bench.gpu.answers
    python -m bench.gpu.answers --enforce-eager     # any other flag goes to all servers

What to run first on a GPU that is new to this code: a kernel or a CUDA graph that computes
something else makes wrong answers, not an error. Every server gets the same held-out questions, all
at once and greedily. The exit status is 1 if one has less than 90% of them right (on a CPU each has
more), or if its log says that a kernel or a graph was found wrong at start, which is printed.
Written to --results: answers.csv, one row a server.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.context import ROOT, Row, command_line, progress, publish, reporting_failures
from bench.runs import ANSWER_TOKENS
from bench.servers import READY_TIMEOUT_S, Server
from bench.toys.evaluate import ServedModel
from bench.toys.suite import FAMILIES, questions
from dllm.settings.command import CommandError
from dllm.tools.client import connect

MODELS = ROOT / "checkpoints"
# A server takes this share of a GPU whatever it needs, and does not start where less is free.
FLAGS = (
    *("--max-model-len", "512", "--kv-cache-memory-bytes", "64M"),
    *("--gpu-memory-utilization", "0.1"),
)
LEAST = 0.9
EACH = 4  # questions of a family
ASKING_S = 45  # of the time of a server; the rest is for its start
DRAFTER = {"method": "dflash", "model": f"{MODELS}/tiny-drafter", "num_speculative_tokens": 15}
# The model of each server, and its flags beside those of all.
SERVERS: dict[str, tuple[str, ...]] = {
    "tiny-dllm": ("tiny-dllm",),
    "tiny-llada2": ("tiny-llada2",),
    "tiny-sdar": ("tiny-sdar",),
    "tiny-nemotron": ("tiny-nemotron",),
    "self-speculation": ("tiny-nemotron", "--additional-config.dllm.decoding", "self_speculation"),
    "tiny-drafter": (
        *("tiny-ar", "--speculative-config", json.dumps(DRAFTER)),
        # On CUDA vLLM's own drafts unless one is given.
        *("--additional-config.dllm.drafter.policy", "fixed"),
    ),
}


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    options, flags = parse(arguments)
    rows = answers(options.servers, flags, options.within)
    publish(options.results / "answers.csv", rows)
    return int(not all(map(is_right, rows)))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = command_line(__doc__)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    within = "seconds in which a server starts and answers"
    parser.add_argument("--within", type=float, default=READY_TIMEOUT_S, help=within)
    return parser.parse_known_args(arguments)


def answers(
    names: Sequence[str],
    flags: Sequence[str],
    within: float,
    environment: Mapping[str, str] | None = None,
) -> list[Row]:
    """Start all servers at once, and ask each when it is ready; what each said is printed."""
    end = time.monotonic() + within

    def run(name: str) -> Row:
        model, *own = SERVERS[name]
        log, given = Path(folder) / f"{name}.log", (*FLAGS, *own, *flags)
        server = Server(name, f"{MODELS}/{model}", log, given, environment)
        server.ready_s = max(within - ASKING_S, 1.0)
        with server as running:
            row = ask(running, end)
        print(f"{name:18} {row['right']} of {row['asked']} right", flush=True)
        if row["log"]:
            print(row["log"], flush=True)
        return row

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(run, names))


def ask(server: Server, end: float) -> Row:
    """``log``: what it found wrong, or why there is no answer by ``end``."""
    asked = questions(FAMILIES, "heldout", EACH)
    row: Row = {"server": server.name, "right": 0, "asked": len(asked), "log": ""}
    try:
        server.wait_until_ready()
        progress(f"{server.name} is ready")
        connection = connect(server.url, None)
        left = max(end - time.monotonic(), 1e-3)
        client = connection.client.with_options(timeout=left, max_retries=0)
        bounded = dataclasses.replace(connection, client=client)
        model = ServedModel(bounded, ANSWER_TOKENS, len(asked), temperature=0)
        found = model.answer(asked).answers
    except (CommandError, RuntimeError) as error:
        return row | {"log": str(error)}
    row["right"] = sum(one.is_correct(got.text) for one, got in zip(asked, found, strict=True))
    said = server.log.read_text(errors="replace").splitlines()
    for line in said:
        if "graphs were compared" in line:
            progress(f"{server.name}: {line}")
    return row | {"log": "\n".join(line for line in said if "wrong on this GPU" in line)}


def is_right(row: Row) -> bool:
    return bool(not row["log"] and row["right"] >= LEAST * row["asked"])


if __name__ == "__main__":
    sys.exit(main())
