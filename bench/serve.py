"""Ours and vLLM's built-in DiffusionGemma side by side: same engine, same CPU runtime, same flags.

    python -m bench.serve                       # compiled, fixed and adaptive denoise steps
    python -m bench.serve --eager               # with --enforce-eager
    python -m bench.serve --rounds 9 --model checkpoints/tiny-random --serve-flags="--dtype float32"

Starts unmodified ``vllm serve`` twice, with the plugin and with ``DLLM_DISABLE=1``, and drives one
at a time with the real ``vllm bench serve``, one request at a time, in the order A B, B A, A B...,
so that a machine that gets slower or faster meanwhile does so to both. The other server is up and
idle; the processor time it used is reported.

Before anything is timed, both must answer with HTTP 200 and exactly the number of tokens asked
for, and ours must answer two equal seeded requests equally (the built-in refuses a seed). Every
timed run must be complete and, on the fixed schedule, have taken the same number of denoise steps
a block on both sides. Otherwise there is no table and no CSV, and the exit code is 1.

Schedules:

    fixed     every block takes --steps denoise steps: ``max_denoising_steps`` = --steps and
              ``confidence_threshold`` = 0. Milliseconds per denoise step are compared here.
    adaptive  the checkpoint's generation_config.json, in which blocks stop when they converge

Both reach the servers as ``--generation-config DIR``, because the built-in does not read
``--override-generation-config``. bench.report defines the columns.

Where a checkpoint's encoder and decoder have different ``layer_scalar`` (checkpoints/tiny-random
does, on purpose), the built-in applies the encoder's to both and so runs another model: its blocks
converge after another number of denoise steps, and tokens/s on the adaptive schedule say nothing
about speed. Milliseconds per denoise step and the fixed schedule do not depend on it.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import (
    BUILTIN,
    OURS,
    Context,
    GateError,
    Measurement,
    Workload,
    measurement,
    response_problems,
    seed_problems,
    table,
    write_csv,
)
from bench.servers import Server, ServerOptions, child_environment, tail, vllm_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCHEDULES = ("fixed", "adaptive")
NUM_WARMUPS = 3
CLIENT_TIMEOUT_S = 900


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path
    schedules: tuple[str, ...]
    steps: int
    is_eager: bool
    rounds: int
    workload: Workload
    serve_flags: tuple[str, ...]
    results: Path

    @property
    def mode(self) -> str:
        """``eager`` or ``compiled``, also part of the file name."""
        return "eager" if self.is_eager else "compiled"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table per schedule, write one CSV."""
    options = parse(arguments)
    rows: list[tuple[Context, Measurement]] = []
    tables = []
    try:
        for schedule in options.schedules:
            measurements = measure(options, schedule)
            rows += [(context(options, schedule), one) for one in measurements]
            tables.append(table(title(options, schedule), measurements))
    except GateError as error:
        print(f"No speed is reported, because outputs are wrong:\n{error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    path = options.results / f"serve_{options.mode}.csv"
    write_csv(path, rows)
    print("\n" + "\n\n".join(tables) + f"\n\n{path}")
    return 0


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("checkpoints/tiny-random"))
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=8, help="per block, fixed schedule")
    parser.add_argument("--eager", action="store_true", help="serve with --enforce-eager")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs")
    parser.add_argument("--num-prompts", type=int, default=24, help="requests of a run")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument(
        "--serve-flags",
        type=shlex.split,
        default=shlex.split("--kv-cache-memory-bytes 256M"),
        help="of both servers, in one string",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    given = parser.parse_args(arguments)
    config = given.model / "config.json"
    if not config.exists():
        parser.error(f"--model {given.model}: no config.json there; give a checkpoint's folder.")
    for flag, value in (("--rounds", given.rounds), ("--steps", given.steps)):
        if value < 1:
            parser.error(f"{flag} {value}; allowed: at least 1.")
    try:
        workload = Workload(
            given.num_prompts,
            given.input_len,
            given.output_len,
            canvas_length=json.loads(config.read_text())["canvas_length"],
        )
    except ValueError as error:
        parser.error(str(error))
    return Options(
        model=given.model,
        schedules=tuple(given.schedule),
        steps=given.steps,
        is_eager=given.eager,
        rounds=given.rounds,
        workload=workload,
        serve_flags=tuple(given.serve_flags),
        results=given.results,
    )


# --- servers -------------------------------------------------------------------------------------


def server_options(options: Options, generation_config: Path) -> tuple[ServerOptions, ...]:
    """The two servers; they differ in one environment variable."""
    flags = ("--generation-config", str(generation_config), *options.serve_flags)
    if options.is_eager:
        flags += ("--enforce-eager",)
    return (
        ServerOptions(OURS, str(options.model), flags),
        ServerOptions(BUILTIN, str(options.model), flags, (("DLLM_DISABLE", "1"),)),
    )


def write_generation_config(options: Options, schedule: str, folder: Path) -> None:
    """The checkpoint's generation_config.json, with fixed denoise steps if asked for."""
    generation = json.loads((options.model / "generation_config.json").read_text())
    if schedule == "fixed":
        generation |= {"max_denoising_steps": options.steps, "confidence_threshold": 0.0}
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(generation))


def check(server: Server, workload: Workload) -> float:
    """Let a server through the gate; returns the seconds its first request took.

    Raises:
        GateError: an answer is wrong.
    """
    name = server.options.name
    body: dict[str, Any] = {
        "prompt": [20 + position % 100 for position in range(workload.input_len)],
        "max_tokens": workload.output_len,
        "ignore_eos": True,
    }
    responses = [server.complete(**body)]
    if name == OURS:
        responses += [server.complete(**body, seed=1), server.complete(**body, seed=1)]
    problems = response_problems(name, responses, workload.output_len)
    if name == OURS and not problems:
        problems += seed_problems(name, *responses[1:])
    if problems:
        raise GateError("\n".join(problems))
    return responses[0].seconds


# --- measuring -----------------------------------------------------------------------------------


def measure(options: Options, schedule: str) -> list[Measurement]:
    """All pairs of one schedule.

    Raises:
        GateError: outputs are wrong.
        RuntimeError: a server or client failed.
    """
    fixed_steps = options.steps if schedule == "fixed" else None
    workload = replace(options.workload, steps_per_block=fixed_steps)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-bench-")))
        write_generation_config(options, schedule, folder / "generation")
        servers = [
            stack.enter_context(Server(one, folder / f"{one.name}.log"))
            for one in server_options(options, folder / "generation")
        ]
        progress(f"{options.mode}, {schedule}: starting both servers")
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        first_request_s = {server: check(server, workload) for server in servers}
        measurements = []
        for pair in range(options.rounds):
            ordered = servers if pair % 2 == 0 else servers[::-1]
            for position, server in enumerate(ordered):
                (idle,) = (other for other in servers if other is not server)
                start, idle_before = time.monotonic(), idle.cpu_seconds()
                saved = drive(server, workload, pair, folder)
                idle_cpu_s = idle.cpu_seconds() - idle_before
                one = measurement(
                    server.options.name,
                    saved,
                    workload,
                    pair=pair,
                    position=position,
                    first_request_s=first_request_s[server],
                    idle_cpu_percent=100 * idle_cpu_s / (time.monotonic() - start),
                )
                measurements.append(one)
                progress(f"  pair {pair}: {one.server}")
    return measurements


def drive(server: Server, workload: Workload, seed: int, folder: Path) -> dict[str, Any]:
    """Run ``vllm bench serve`` once and return what it saved.

    The seed differs between pairs, so that no prompt is found in the prefix cache. No sampling
    parameter is sent: the built-in refuses them.
    """
    name = f"{server.options.name}-{seed}"
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        completed = subprocess.run(
            client_command(server, workload, seed, folder, f"{name}.json"),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
    result = folder / f"{name}.json"
    if completed.returncode or not result.exists():
        raise RuntimeError(
            f"vllm bench serve failed against the {server.options.name} server:\n{tail(log)}"
        )
    saved: dict[str, Any] = json.loads(result.read_text())
    return saved


def client_command(
    server: Server, workload: Workload, seed: int, folder: Path, filename: str
) -> list[str]:
    """The command line of ``vllm bench serve``."""
    flags: dict[str, object] = {
        "--backend": "openai",
        "--base-url": server.url,
        "--endpoint": "/v1/completions",
        "--model": server.options.model,
        "--dataset-name": "random",
        "--random-input-len": workload.input_len,
        "--random-output-len": workload.output_len,
        "--num-prompts": workload.num_prompts,
        "--num-warmups": NUM_WARMUPS,
        "--max-concurrency": 1,
        "--seed": seed,
        "--result-dir": folder,
        "--result-filename": filename,
    }
    pairs = [str(part) for flag in flags.items() for part in flag]
    switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    return [vllm_command(), "bench", "serve", *pairs, *switches]


def progress(text: str) -> None:
    """Say what is going on; no speeds, which may yet be refused."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- context -------------------------------------------------------------------------------------


def title(options: Options, schedule: str) -> str:
    """The line above a table."""
    workload = options.workload
    steps = f"{options.steps} denoise steps a block" if schedule == "fixed" else "until converged"
    return (
        f"{options.mode}, {schedule} ({steps}), {options.rounds} pairs of runs of "
        f"{workload.num_prompts} requests, one at a time, {workload.input_len} + "
        f"{workload.output_len} tokens; median [min .. max]"
    )


def context(options: Options, schedule: str) -> Context:
    """Where and with what this was measured."""
    return Context(
        mode=options.mode,
        schedule=schedule,
        commit=commit(),
        machine=machine(),
        versions=versions(),
        model=str(options.model),
        command=shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]]),
    )


def commit() -> str:
    """Short hash of the checked-out commit, with ``-dirty`` if tracked files differ from it."""
    description = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return description.stdout.strip() or "unknown"


def machine() -> str:
    """Processor and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def versions() -> str:
    """Of what the numbers depend on."""
    return ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "torch", "transformers")
    )


if __name__ == "__main__":
    sys.exit(main())
