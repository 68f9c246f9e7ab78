"""``vllm serve`` processes of a benchmark: started on free ports, watched, stopped."""

import contextlib
import json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

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
# A small KV cache: vLLM would take most of the memory for the first of several servers.
SERVE_FLAGS = ("--kv-cache-memory-bytes", "256M", "--max-model-len", "1024")

COUNTED = ("dllm:", "vllm:diffusion_")  # what the names of counters begin with that are read


@dataclass(frozen=True)
class ServerOptions:
    """One ``vllm serve``.

    Attributes:
        name: of its log file, and in messages.
        model: path or name of the checkpoint.
        flags: of ``vllm serve``, without host and port.
        environment: beside the inherited one; ``DLLM_DISABLE`` chooses the implementation.
    """

    name: str
    model: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Response:
    """A server's answer to a completion request; without ``token_ids`` unless the status is 200.

    A status of 0 means that there was no answer.
    """

    status: int
    token_ids: tuple[int, ...] = ()
    error: str = ""


class Server:
    """A running ``vllm serve``; a context manager that stops it.

    ``start`` returns at once, so that several servers load at the same time; ``wait_until_ready``
    waits for this one.
    """

    def __init__(self, options: ServerOptions, log: Path) -> None:
        self.options = options
        self.port = free_port()
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """``http://127.0.0.1:<port>``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that was started, which is the API server."""
        assert self._process is not None, "start() first"
        return self._process.pid

    @property
    def command(self) -> list[str]:
        """The command line, as a user would type it."""
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [vllm_command(), "serve", self.options.model, *address, *self.options.flags]

    def start(self) -> None:
        """Start the process in a session of its own."""
        environment = child_environment() | dict(self.options.environment)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: it ended, or took more than ``READY_TIMEOUT_S``; with the end of its log.
        """
        assert self._process is not None, "start() first"
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(self._failure(f"ended with code {self._process.returncode}"))
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(self._failure(f"was not ready after {READY_TIMEOUT_S} s"))

    def _failure(self, what: str) -> str:
        return f"the {self.options.name} server {what}:\n{tail(self.log)}"

    def complete(self, **body: Any) -> Response:
        """POST to /v1/completions and wait; the model's name is filled in."""
        body = {"model": self.options.model, "return_token_ids": True} | body
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
                reply = json.load(answer)
        except urllib.error.HTTPError as error:
            return Response(error.code, error=error.read().decode(errors="replace")[:500])
        except OSError as error:
            return Response(0, error=str(error))
        token_ids = tuple(reply["choices"][0]["token_ids"])
        return Response(200, token_ids)

    def counters(self) -> dict[str, float]:
        """NAME -> value of a counter under /metrics, labels summed.

        Those of ours (``dllm:NAME_total``), and vLLM's of diffusion models (``vllm:NAME_total``).

        Raises:
            OSError: there is no answer.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=READY_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            family.name.partition(":")[2]: sum(
                sample.value for sample in family.samples if sample.name.endswith("_total")
            )
            for family in families
            if family.type == "counter" and family.name.startswith(COUNTED)
        }

    def pause(self) -> None:
        """Stop all of its processes: a server that waits for work polls, and takes a core."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the process, kindly first, and what is left of its group."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.stop(STOP_TIMEOUT_S if failure is None else 1)


def vllm_command() -> str:
    """The ``vllm`` of this interpreter's environment, else the one on the path."""
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise RuntimeError("no `vllm` command in this environment: run `make setup` first.")
    return found


def child_environment() -> dict[str, str]:
    """The environment of servers and clients alike, without a ``DLLM_DISABLE`` of the caller's."""
    inherited = {key: value for key, value in os.environ.items() if key != "DLLM_DISABLE"}
    return ENVIRONMENT | inherited


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, num_lines: int = 15) -> str:
    """The errors that a log names, in order, and its last lines.

    The last lines alone are those of the process that waited for the one that failed.
    """
    lines = log.read_text(errors="replace").splitlines()
    errors = (match[0] for line in lines if (match := re.search(r"\w+Error: .*", line)))
    return "\n".join([*dict.fromkeys(errors), "...", *lines[-num_lines:]])
