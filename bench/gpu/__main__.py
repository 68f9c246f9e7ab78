"""Three calls for a GPU that is there for minutes: right answers, and milliseconds of a pass.

    python -m bench.gpu --call 1        # then 2, then 3, whatever the one before said
    python -m bench.gpu --toy           # all three at toy size, on any machine

README.md says what each call does. Engines are processes that outlive a call: most of it is
starting, and the next call waits for those that are not done. They are measured while nothing else
computes. All have dummy weights, as ``bench.gpu.engine`` makes them. Written to --out, in at most
eight files: what servers answered, what each engine has found as JSON, failed.log, and report.txt.
The exit status is 1 if an answer or an engine was wrong.
"""

import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from bench.context import ROOT, command_line, progress, publish
from bench.gpu import answers
from bench.gpu.engine import PASSES
from bench.servers import BUILTIN_ENVIRONMENT, child_environment

CALLS = (1, 2, 3)
READY, DONE = ("warm", "done"), ("done",)
FAILED = "FAILED"  # the beginning of a stage
# What lines of a log say that tell what was chosen, and what was found wrong.
TOLD = ("dllm:", "MoE", "Fp8", "FlashAttention", "AttentionBackend", "CUDA graph", "took", "ERROR")
FEW = ("tiny-dllm", "tiny-nemotron")
MODELS = (*FEW, "tiny-sdar", "tiny-llada2")
DRAFTING = ("tiny-drafter", "self-speculation")  # their targets have vLLM's own attention
EAGER = "--enforce-eager"
FULL_ALONE = "--compilation-config.mode 0 --compilation-config.cudagraph_mode FULL_DECODE_ONLY"
# vLLM would choose its FlashAttention even without its libraries, and end in the first pass.
# Drafts of our drafter are on our kernel all the same.
DRAFTER = "--attention-backend TRITON_ATTN"
LARGE = 130 << 30  # bytes of a GPU that holds three engines
# Passes of their own for prompts and emitted blocks: the loop replays the first pass of its engine
# step only if that is a full graph, of canvases alone (``engine.loop``). Else it has no graph.
LOOP = {
    "async_scheduling": False,
    "additional_config": {"dllm": {"denoise_loop_ms": 1000, "separate_passes": True}},
}


class Engine(NamedTuple):
    name: str
    llm: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


class Answers(NamedTuple):
    name: str
    flags: str
    servers: Sequence[str]


class Lease:
    """What runs on the machine: its state is in a folder, and is found again by the next call.

    ``out``: for what a call brings home. ``is_toy``: sizes for any machine.
    """

    def __init__(self, folder: Path, out: Path, *, is_toy: bool) -> None:
        self.folder, self.out, self.is_toy = folder, out, is_toy
        self.is_wrong = False
        self._patience = 5 if is_toy else 1  # a CPU may be busy with other things
        # vLLM would end without it.
        has_sampler = importlib.util.find_spec("flashinfer") is not None
        self._sampler = {} if has_sampler else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        self._environment = child_environment() | self._sampler
        self._environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    def start(self, *engines: Engine) -> None:
        """Start what is not done and not running, each in a session of its own."""
        (self.folder / "go").unlink(missing_ok=True)
        for one in engines:
            if self._stage(one) == "done" or self._runs(one):
                continue
            self._file(one, ".json").unlink(missing_ok=True)
            command = [sys.executable, "-m", "bench.gpu.engine", one.name, str(self.folder)]
            command += ["--llm", json.dumps(one.llm), *["--toy"] * self.is_toy]
            with self._file(one, ".log").open("w") as log:
                started = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**self._environment, **one.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._file(one, ".pid").write_text(str(started.pid))

    def wait(self, seconds: float, stages: Sequence[str], *engines: Engine) -> None:
        """Until each has reached one of the stages, or has ended; not longer than ``seconds``."""
        end = time.monotonic() + seconds * self._patience
        while left := [
            one for one in engines if self._stage(one) not in stages and self._runs(one)
        ]:
            if time.monotonic() > end:
                progress(f"not {' or '.join(stages)}: {', '.join(one.name for one in left)}")
                return
            time.sleep(0.2)

    def measure(self, seconds: float, *engines: Engine) -> None:
        (self.folder / "go").touch()
        self.wait(seconds, DONE, *engines)

    def ask(self, seconds: float, *asked: Answers) -> list[bool]:
        """Whether all servers of each answer rightly; they start at once."""
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(partial(self._are_right, seconds * self._patience), asked))

    def _are_right(self, seconds: float, asked: Answers) -> bool:
        name, flags, servers = asked
        if self.is_toy:
            flags, servers = EAGER, servers[:1]
        rows = answers.answers(servers, shlex.split(flags), seconds, self._sampler)
        publish(self.out / f"{name}.csv", rows)
        return all(map(answers.is_right, rows))

    def finish(self) -> None:
        states = {path.stem: path for path in sorted(self.folder.glob("*.json"))}
        found = {name: json.loads(path.read_text()) for name, path in states.items()}
        failed: list[str] = []
        for name, path in states.items():
            shutil.copy(path, self.out)
            text = path.with_suffix(".log").read_text(errors="replace")
            stage = found[name]["stage"]
            is_over = stage != "done" and not self._runs(Engine(name))  # also by a signal
            if stage.startswith(FAILED) or is_over or "wrong on this GPU" in text:
                failed += [f"== {name}", text[-300_000:]]
            told = [line for line in text.splitlines() if any(word in line for word in TOLD)]
            found[name]["log"] = told[-14:]
        if failed:
            self.is_wrong = True
            (self.out / "failed.log").write_text("\n".join(failed))
        text = report(found)
        (self.out / "report.txt").write_text(text)
        print(text, flush=True)

    def _file(self, engine: Engine, suffix: str) -> Path:
        return self.folder / f"{engine.name}{suffix}"

    def _stage(self, engine: Engine) -> str:
        path = self._file(engine, ".json")
        stage: str = json.loads(path.read_text())["stage"] if path.exists() else ""
        return stage

    def _runs(self, engine: Engine) -> bool:
        path = self._file(engine, ".pid")
        if not path.exists() or not psutil.pid_exists(int(path.read_text())):
            return False
        return bool(psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE)


def first_call(lease: Lease) -> None:
    """Do graphs answer rightly, and does the large shape start?"""
    large = Engine("ours-triton", {"attention_backend": "CUSTOM"})
    lease.start(large)
    right, drafts = lease.ask(
        240, Answers("compiled", "", MODELS), Answers("drafting", DRAFTER, DRAFTING)
    )
    lease.is_wrong |= not (right and drafts)
    if not right and not all(lease.ask(90, Answers("full-graphs", FULL_ALONE, FEW))):
        lease.ask(75, Answers("eager", EAGER, FEW))
    lease.wait(60, READY, large)
    lease.measure(45, large)


def second_call(lease: Lease) -> None:
    """Ours beside the built-in, and with the loop beside them."""
    engines = side_by_side(lease)
    lease.start(*engines)
    lease.wait(230, READY, *engines)
    lease.measure(90, *engines)


def third_call(lease: Lease) -> None:
    """What is still open."""
    lease.measure(60, *side_by_side(lease))


def side_by_side(lease: Lease) -> tuple[Engine, ...]:
    if lease.is_toy or torch.cuda.mem_get_info()[1] >= LARGE:
        return *PAIR, Engine("ours-loop", LOOP)
    progress("ours-loop is left out: three engines of 25 GiB of weights do not fit this GPU.")
    return PAIR


PAIR = (Engine("ours"), Engine("built-in", environment=BUILTIN_ENVIRONMENT))


States = Mapping[str, Mapping[str, Any]]  # by engine: what ``engine.State`` has written


def report(states: States) -> str:
    lines: list[str] = []
    for name, state in states.items():
        lines += ["", f"== {name}: {state['stage']}; {state.get('what')}; {state['seconds']}"]
        lines += [f"    {line[:220]}" for line in state["log"]]
        for load, blocks in state["ms"].items():
            middle = statistics.median(blocks)
            lines.append(f"  {load} at once: {middle / PASSES:7.3f} ms a pass, of blocks {blocks}")
        for load, kernels in state["kernels"].items():
            lines.append(f"  the longest kernels, {load} at once, ms a pass:")
            lines += [f"  {ms / PASSES:9.3f} {name}" for ms, _, name in kernels[:20]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, writes=False)
    parser.add_argument("--call", nargs="+", type=int, choices=CALLS, default=list(CALLS))
    parser.add_argument("--toy", action="store_true", help="toy sizes; no figure means anything")
    out = Path(os.environ.get("OUT") or ROOT / "build/gpu")
    parser.add_argument("--out", type=Path, default=out, help="folder of what is brought home")
    state = Path.home() / ".cache/dllm/gpu"
    parser.add_argument("--state", type=Path, default=state, help="folder of running engines")
    options = parser.parse_args(arguments)
    if not (options.toy or torch.cuda.is_available()):
        parser.error("there is no GPU; allowed: --toy.")
    options.out.mkdir(parents=True, exist_ok=True)
    options.state.mkdir(parents=True, exist_ok=True)
    lease = Lease(options.state, options.out.resolve(), is_toy=options.toy)
    for call in options.call:
        progress(f"call {call}")
        (first_call, second_call, third_call)[call - 1](lease)
    lease.finish()
    return int(lease.is_wrong)


if __name__ == "__main__":
    sys.exit(main())
