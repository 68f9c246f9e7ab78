"""An engine in processes of its own that does a fixed amount of work, with and without a profiler.

Started by `bench.profile_step` and `bench.h200`, several at once if they are to be compared: which
implementation serves is fixed when a process imports vLLM. An `EngineProcess` is handed one task
after the other over a pipe, so that whoever holds several can alternate.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.context import ROOT
from bench.servers import child_environment, tail

EXECUTOR = "bench.profiled_executor.ProfiledExecutor"
EXTENSION = "bench.step_ranges.StepRanges"
OURS, BUILTIN = "ours", "built-in"
TASK_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
ANSWER = "@answer "  # begins a line that is meant for us: vLLM prints as well


@dataclass(frozen=True)
class Job:
    """What an engine serves, and what a task is.

    Attributes:
        folder: where traces and logs go.
        mode: eager or compiled.
        max_num_seqs: as many requests as a task ever has.
        steps, blocks, input_len: denoise steps of every block, blocks and prompt of every request.
        profiler: clock (ranges only) or torch (vLLM's torch.profiler as well).
        options: more arguments of ``LLM``.
    """

    model: str
    folder: str
    server: str = OURS
    mode: str = "eager"
    max_num_seqs: int = 1
    steps: int = 16
    blocks: int = 4
    input_len: int = 64
    profiler: str = "clock"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its traces and in messages."""
        return f"{self.server}-{self.mode}"


@dataclass(frozen=True)
class Taken:
    """What the client saw of some work, and of the same under the profiler if it was asked for.

    Attributes:
        plain_wall_ms, wall_ms: until all answers were there, without and with the profiler.
        path: of the trace.
        canvas_rows: that the requests' denoise steps have, and the built-in's commits.
        tokens: of all answers together.
    """

    concurrency: int
    plain_wall_ms: float
    canvas_rows: int
    tokens: int
    wall_ms: float = 0.0
    path: str = ""


class EngineProcess:
    """A job being served; a context manager."""

    def __init__(self, job: Job, ready_timeout_s: float = 600.0) -> None:
        """Start; `wait_until_ready` before the first task."""
        self.job = job
        self._log = Path(job.folder) / f"{job.name}.log"
        self._ready_by = time.monotonic() + ready_timeout_s
        self._unread = b""
        environment = child_environment() | {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the trace has a part for each process
        }
        environment |= {"DLLM_DISABLE": "1"} if job.server == BUILTIN else {}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.profile_engine", json.dumps(asdict(job))],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # no more tasks: it ends, unless something went wrong
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S if failure is None else 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # engine core and worker with it
        self._process.wait()

    def wait_until_ready(self) -> float:
        """Seconds that its start took. Raises RuntimeError, with its last words, if it failed."""
        return float(self._answer(self._ready_by)["ready_s"])

    def do(self, concurrency: int, index: int, *, is_profiled: bool = True) -> Taken:
        """One task; a ``concurrency`` is warmed up when its ``index`` is 0.

        Raises:
            RuntimeError: it failed or answered with too few tokens; the message says which.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{concurrency} {index} {int(is_profiled)}\n".encode())
        self._process.stdin.flush()
        return Taken(**self._answer(time.monotonic() + TASK_TIMEOUT_S))

    def _answer(self, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if line.startswith(ANSWER.encode()):
                    answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER.encode()))
                    return answer
                continue
            left = until - time.monotonic()
            is_readable = left > 0 and select.select([pipe], [], [], left)[0]
            data = os.read(pipe, 1 << 16) if is_readable else b""
            if not data:
                why = "it ended" if is_readable else "it took too long"
                raise RuntimeError(f"{self.job.name}: {why}.\n{tail(self._log)}")
            self._unread += data


# --- in the process ------------------------------------------------------------------------------


def main() -> None:
    """Serve the job in argv: a task a line, an answer a line."""
    job = Job(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="dllm-profile-") as generation:
        start = time.monotonic()
        worker = _Worker(job, Path(generation))
        print(ANSWER + json.dumps({"ready_s": time.monotonic() - start}), flush=True)
        for line in sys.stdin:
            print(ANSWER + json.dumps(asdict(worker.do(*map(int, line.split())))), flush=True)


class _Worker:
    """The engine of a job."""

    def __init__(self, job: Job, generation_folder: Path) -> None:
        from vllm import LLM

        model = Path(job.model)
        generation = json.loads((model / "generation_config.json").read_text())
        generation |= {"max_denoising_steps": job.steps, "confidence_threshold": 0.0}
        (generation_folder / "generation_config.json").write_text(json.dumps(generation))
        self.job = job
        self.canvas = json.loads((model / "config.json").read_text())["canvas_length"]
        options: dict[str, Any] = {
            "enforce_eager": job.mode == "eager",
            "max_model_len": job.input_len + (job.blocks + 1) * self.canvas,
            "max_num_seqs": job.max_num_seqs,
            "kv_cache_memory_bytes": 256 << 20,
        }
        if job.profiler == "torch":
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": job.folder,
                "torch_profiler_with_stack": False,
            }
        self.llm = LLM(
            job.model,
            generation_config=str(generation_folder),
            distributed_executor_backend=EXECUTOR,
            worker_extension_cls=EXTENSION,
            **(options | dict(job.options)),
        )

    def do(self, concurrency: int, index: int, is_profiled: int) -> Taken:
        """The work without and, if asked for, with the profiler, in turn first."""
        job = self.job
        if index == 0:
            self._work(concurrency, seed=0)
        is_plain_first = index % 2 == 0 or not is_profiled
        plain_ms = self._work(concurrency, 2 * index + 1) if is_plain_first else 0.0
        profiled = self._profiled(concurrency, index) if is_profiled else (0.0, "")
        plain_ms = plain_ms or self._work(concurrency, 2 * index + 1)
        # The built-in commits every block in a pass of its own, with a canvas.
        passes = job.steps + (job.server == BUILTIN)
        tokens = concurrency * job.blocks * self.canvas
        return Taken(concurrency, plain_ms, tokens * passes, tokens, *profiled)

    def _profiled(self, concurrency: int, index: int) -> tuple[float, str]:
        """Milliseconds of the work under the profiler, and where its trace is."""
        path = Path(self.job.folder) / f"{self.job.name}-{concurrency}-{index}.json"
        self.llm.collective_rpc("name_step_parts")
        if self.job.profiler == "torch":
            self.llm.start_profile()
        wall_ms = self._work(concurrency, 2 * index + 2)
        if self.job.profiler == "torch":
            self.llm.stop_profile()
        self.llm.collective_rpc("write_step_trace", args=(str(path),))
        self.llm.collective_rpc("unname_step_parts")
        if self.job.profiler == "torch":
            path = keep_newest(Path(self.job.folder), path)
        return wall_ms, str(path)

    def _work(self, concurrency: int, seed: int) -> float:
        """Milliseconds until all answers are there; prompts differ, so nothing is found cached."""
        from vllm import SamplingParams, TokensPrompt

        output_len = self.job.blocks * self.canvas
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
        prompts = [
            TokensPrompt(
                prompt_token_ids=[
                    20 + (seed * 31 + number * 7 + position * (seed + 3)) % 100
                    for position in range(self.job.input_len)
                ]
            )
            for number in range(concurrency)
        ]
        start = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        wall_ms = 1e3 * (time.monotonic() - start)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != [output_len] * concurrency:
            raise RuntimeError(f"{self.job.name}: {lengths} tokens instead of {output_len} each.")
        return wall_ms


def keep_newest(folder: Path, path: Path) -> Path:
    """Torch's last trace if there is a GPU, of which it knows more; else the one at ``path``."""
    traces = sorted(folder.glob("*.pt.trace.json*"), key=lambda file: file.stat().st_mtime)
    if not traces:
        raise RuntimeError(f"torch.profiler wrote no trace into {folder}.")
    renamed = traces[-1].rename(path.with_name(f"torch-{path.stem}" + ".json.gz"))
    import torch

    return renamed if torch.cuda.is_available() else path


if __name__ == "__main__":
    main()
