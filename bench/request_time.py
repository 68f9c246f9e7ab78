"""What one request costs between socket and socket: milliseconds of CPU time, by process and part.

    python -m bench.request_time

A server answers questions of one block, one request at a time. Each block takes one denoise step,
and, on a second server, four; then the same for vLLM's built-in. A process's CPU time is what the
kernel counts, divided by the number of answers. py-spy samples how it divides among the parts. That
stops the process at each sample, so the times are measured first, without it. py-spy needs root, or
``sysctl kernel.yama.ptrace_scope=0``.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import psutil

from bench.context import ROOT, Rows, command_line, publish, reporting_failures
from bench.serve import BUILTIN, OURS, write_generation_config
from bench.servers import BUILTIN_ENVIRONMENT, SERVE_FLAGS, Server
from bench.tables import Section, grouped, markdown
from dllm.tasks.suite import FAMILIES, questions

API, ENGINE = "API server", "engine"
PLUGIN = "this plugin"
# Parts of each process, and what a frame of their stacks contains, ``function(file:line)``. A stack
# belongs to the first part that one of its frames matches.
PARTS = {
    API: {
        PLUGIN: "",  # that it wraps a function of vLLM does not make the function's time its own
        "tokenizer": "(tokenizers/ _batch_encode tokenization_utils tokenize_prompt",
        "chat template": "(jinja2/ <template> chat_template chat_utils",
        "detokenizer": "detokenizer.py",
        "messages to and from the engine": "serial_utils core_client (zmq/ (msgspec/",
        "checks of vLLM": "input_processor sampling_params.py (vllm/renderers/",
        "output processing": "output_processor output_handler metrics/ (prometheus",
        "parsing": "get_request_handler (pydantic/main solve_dependencies (json/dec",
        "response": "serialize_response (starlette/resp (json/enc model_dump",
        "HTTP": "(uvicorn/ (starlette/ (fastapi/ (asyncio/ (vllm/entrypoints/",
    },
    ENGINE: {
        "head": "compute_logits _logits(dllm",
        "forward": "(dllm/models/gemma/backbone forward(vllm/ (vllm/compilation/",
        "input preparation": "canvas_inputs canvas_attention prepare_inputs prepare_attn"
        " _condition add_requests update_requests",
        "emission": "(dllm/engine/emitted_blocks update_from_output",
        "sampler": "(dllm/engine/sampler sample(vllm/v1/worker",
        "scheduler": "(vllm/v1/core/ (dllm/engine/scheduler",
        "messages": "serial_utils process_input_sockets process_output_sockets (zmq",
    },
}
# Innermost frames of threads that wait. py-spy counts them where it cannot read a thread's state.
# The event loop waits in C, in ``Runner.run``, which also sends and receives; that is not counted.
WAITING = ("Condition.wait(", "_worker(", "Poller.poll(", "select(", "_watch(", "Runner.run(")
REST = "the rest"


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the CSV."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints/tiny-dllm")
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--server", nargs="+", choices=(OURS, BUILTIN), default=[OURS, BUILTIN])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of two measurements")
    options = parser.parse_args(arguments)
    rows: Rows = []
    for server, steps in product(options.server, options.steps):
        rows += measure(options, server, steps)
    publish(options.results / SECTION.file, rows)
    print(SECTION(options.results))
    return 0


def measure(options: argparse.Namespace, kind: str, steps: int) -> Rows:
    """The rows of one server, whose blocks take so many denoise steps."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dllm-request-")))
        write_generation_config(options.model, folder / "generation", steps)
        flags = (*SERVE_FLAGS, "--generation-config", str(folder / "generation"))
        environment = BUILTIN_ENVIRONMENT if kind == BUILTIN else {}
        server = stack.enter_context(
            Server(kind, str(options.model), folder / "log", flags, environment)
        )
        server.wait_until_ready()
        processes = {API: server.process.pid, ENGINE: engine_of(server.process.pid)}
        ask(server, 5.0)  # warms up
        before = {name: cpu_ms(pid) for name, pid in processes.items()}
        count, wall_ms = ask(server, options.seconds)
        spent = {name: (cpu_ms(pid) - before[name]) / count for name, pid in processes.items()}
        shares = {}
        for name, pid in processes.items():
            stacks = sampled(pid, folder / "stacks", lambda: ask(server, options.seconds))
            shares[name] = parts_of(name, stacks)
    return [
        {
            "server": kind,
            "steps": str(steps),
            "process": name,
            "part": part,
            "cpu_ms": f"{share * spent[name]:.4f}",
            "wall_ms": f"{wall_ms:.3f}",
            "num_requests": str(count),
        }
        for name in processes
        for part, share in shares[name].items()
    ]


def engine_of(pid: int) -> int:
    """The engine's process: that child of the API server which has used most CPU time."""
    children = psutil.Process(pid).children(recursive=True)
    return int(max(children, key=lambda child: sum(child.cpu_times()[:2])).pid)


def cpu_ms(pid: int) -> float:
    """CPU time that a process has used, in user and system mode."""
    return 1e3 * float(sum(psutil.Process(pid).cpu_times()[:2]))


def ask(server: Server, seconds: float) -> tuple[int, float]:
    """Ask questions for so long: the number of answers, and milliseconds for each one."""
    asked = [question.prompt for question in questions(FAMILIES, "heldout", 20)]
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        said = [{"role": "user", "content": asked[count % len(asked)]}]
        seed = {} if server.name == BUILTIN else {"seed": count}  # which the built-in refuses
        server.post("/v1/chat/completions", messages=said, max_tokens=32, **seed)
        count += 1
    return count, 1e3 * (time.perf_counter() - start) / count


def sampled(pid: int, file: Path, work: Callable[[], object]) -> list[tuple[str, int]]:
    """The stacks of a process while ``work`` runs, and how often each was seen.

    Raises:
        RuntimeError: py-spy failed.
    """
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    command = [py_spy, "record", "--pid", str(pid), "--rate", "250", "--format", "raw"]
    spy = subprocess.Popen(
        [*command, "--duration", "unlimited", "--output", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    work()
    spy.send_signal(2)
    _, said = spy.communicate(timeout=60)
    if not file.exists():
        raise RuntimeError(f"py-spy: {said}")
    lines = (line.rpartition(" ") for line in file.read_text().splitlines())
    return [(stack, int(count)) for stack, _, count in lines]


def parts_of(process: str, stacks: Sequence[tuple[str, int]]) -> dict[str, float]:
    """The share of each part in the samples of a process, in the order of ``PARTS``."""
    seen = dict.fromkeys([*PARTS[process], REST], 0)
    for stack, count in stacks:
        frames = stack.replace(" (", "(")
        if not any(name in frames.rpartition(";")[2] for name in WAITING):
            seen[part_of(process, frames)] += count
    return {part: count / sum(seen.values()) for part, count in seen.items()}


def part_of(process: str, frames: str) -> str:
    """The part that a stack belongs to; ``frames`` as in ``PARTS``, from the outermost on."""
    packages = [frame for frame in frames.split(";") if "(dllm/" in frame or "(vllm/" in frame]
    if process == API and packages and "(dllm/" in packages[-1]:
        return PLUGIN
    matching = (
        part
        for part, patterns in PARTS[process].items()
        if any(pattern in frames for pattern in patterns.split())
    )
    return next(matching, REST)


def table(rows: Rows) -> str:
    """A line for each part, a column for each server and number of denoise steps."""
    columns = grouped(rows, "server", "steps")
    lines = []
    for (process,), of_process in grouped(rows, "process").items():
        sums = [0.0] * len(columns)
        for (part,), here in grouped(of_process, "part").items():
            times = [float(row["cpu_ms"]) for row in here]  # in the order of the columns
            sums = [sum(pair) for pair in zip(sums, times, strict=True)]
            lines.append([process, part, *(f"{ms:.2f}" for ms in times)])
        lines.append([process, "**together**", *(f"**{ms:.2f}**" for ms in sums)])
    walls = (float(of_column[0]["wall_ms"]) for of_column in columns.values())
    lines.append(["client", "waits (wall time)", *(f"{wall:.2f}" for wall in walls)])
    heads = [f"{server}, {steps} step{'s' * (steps != '1')}" for server, steps in columns]
    return markdown(["process", "part, ms", *heads], lines)


SECTION = Section("request_cpu.csv", "python -m bench.request_time", table)


if __name__ == "__main__":
    sys.exit(main())
