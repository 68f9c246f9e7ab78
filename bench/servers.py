"""The processes that a benchmark measures: started, asked, paused, stopped."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from prometheus_client.parser import text_string_to_metric_families

from bench.context import GateError

T = TypeVar("T")
READY_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
# One OpenMP thread and no binding, unless the caller says otherwise: several servers share a small
# machine, and vLLM would bind each of them to the same core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # of vLLM's n-gram drafts: a second thread makes a step take 100 ms
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Forked processes need not import everything again; `make serve` sets it, too.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
BUILTIN_ENVIRONMENT = {"DLLM_DISABLE": "1"}  # vLLM's own implementation serves
# An engine and its worker run in the process of their client.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
# A small KV cache: vLLM would take most of the memory for the first of several servers.
SERVE_FLAGS = ("--kv-cache-memory-bytes", "256M", "--max-model-len", "1024")
COUNTED = ("dllm:", "vllm:diffusion_")  # what the names of counters begin with that are read


class ServerProcess:
    """A ``vllm serve MODEL`` on a free port: started, waited for, stopped."""

    process: "subprocess.Popen[bytes]"
    ready_s: float = READY_TIMEOUT_S  # it is ready after so long, or never
    stop_s: float = STOP_TIMEOUT_S

    def __init__(
        self,
        name: str,
        model: str,
        log: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        port: socket.socket | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        """``port``: of ``reserve_port``. ``program``: in the place of ``vllm serve``."""
        self.name, self.model, self.log = name, model, log
        self.flags, self.environment = tuple(flags), dict(environment)
        self._reserved, self._program = port or reserve_port(), program

    @property
    def port(self) -> int:
        return int(self._reserved.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        program = self._program or (vllm_command(), "serve")
        return [*program, self.model, "--host=127.0.0.1", f"--port={self.port}", *self.flags]

    def start(self, before: Callable[[], None] | None = None) -> None:
        """``before`` runs in the child."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=before,
            )

    def is_healthy(self) -> bool:
        """Whether /health returns 200, which needs the engine's process to be alive, too."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=self.ready_s) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_until_ready(self) -> None:
        """Raises RuntimeError with the end of its log: it ended, or took more than ``ready_s``."""
        deadline = time.monotonic() + self.ready_s
        while not self.is_healthy():
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended with code {code}:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                text = f"{self.name} was not ready after {self.ready_s:.0f} s"
                raise RuntimeError(f"{text}:\n{tail(self.log)}")
            time.sleep(0.2)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing is left, the usual case
            os.killpg(self.process.pid, number)

    def stop(self, within: float | None = None) -> None:
        """The process, kindly for so many seconds (``stop_s``), then what is left of its group."""
        self._signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.stop_s if within is None else within)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._reserved.close()


class Server(ServerProcess):
    """A server that is measured, which runs while the context lasts.

    Several may load at the same time: only ``wait_until_ready`` waits.
    """

    def __init__(
        self,
        name: str,
        model: str,
        log: Path,
        flags: Sequence[str] = SERVE_FLAGS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        given = child_environment() | dict(environment or {})
        super().__init__(name, model, log, flags, given)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.stop(None if failure is None else 1)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The body is JSON, with the model's name. Raises GateError unless the status is 200."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps({"model": self.model} | body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            end = f"\n{tail(self.log)}" if error.code >= 500 else ""
            raise GateError(f"{self.name}: HTTP {error.code}: {said}{end}") from None
        except OSError as error:
            raise GateError(f"{self.name}: {error}\n{tail(self.log)}") from None

    def counters(self) -> Counter[str]:
        """``counters`` of /metrics. Raises OSError if there is no answer."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=READY_TIMEOUT_S) as answer:
            return counters(answer.read().decode())

    def pause(self) -> None:
        """Stop all of its processes: a server that waits for work polls, and takes a core."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)


def counters(metrics: str) -> Counter[str]:
    """NAME -> value of ``dllm:NAME_total``, or vLLM's of diffusion models, labels summed."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(COUNTED) and sample.name.endswith("_total"):
                name = sample.name.partition(":")[2].removesuffix("_total")
                found[name] += sample.value  # type: ignore[assignment]
    return found


def vllm_command() -> str:
    """The ``vllm`` of this interpreter's environment, else the one on the path."""
    beside = shutil.which("vllm", path=Path(sys.executable).parent)
    if (found := beside or shutil.which("vllm")) is None:
        raise RuntimeError("no `vllm` command in this environment: run `make setup` first.")
    return found


def child_environment() -> dict[str, str]:
    """The environment of servers, engines and clients alike: ours, beside the caller's.

    Of the caller's without what would overrule what each of them is given.
    """
    overruling = "DLLM_DISABLE", "VLLM_CPU_KVCACHE_SPACE"
    inherited = {key: value for key, value in os.environ.items() if key not in overruling}
    return ENVIRONMENT | inherited


def with_engine(
    function: Callable[..., T], *arguments: object, environment: Mapping[str, str] | None = None
) -> T:
    """What a function returns in a new process, where an ``LLM`` needs no further ones.

    vLLM reads its environment when it is imported, so each engine gets a process, with the
    environment that there is when the process starts.
    """
    given = child_environment() | ALONE | dict(environment or {})
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with mock.patch.dict(os.environ, given, clear=True):
            result = process.submit(function, *arguments)
        return result.result()


def reserve_port() -> socket.socket:
    """A socket that keeps a free port of 127.0.0.1 reserved until vLLM uses it.

    It is bound to the port, but does not listen. The system gives the port to nobody else. vLLM can
    still bind to it, because it sets SO_REUSEADDR as this socket does (on Linux).
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def tail(log: Path, num_lines: int = 15) -> str:
    """The errors that a log names, in order, and its last lines.

    The last lines alone are those of the process that waited for the one that failed.
    """
    lines = log.read_text(errors="replace").splitlines()
    errors = (match[0] for line in lines if (match := re.search(r"\w+Error: .*", line)))
    return "\n".join([*dict.fromkeys(errors), "...", *lines[-num_lines:]])
