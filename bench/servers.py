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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dllm.tools.eval_server import POSITIONS, counter

READY_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
# One OpenMP thread and no binding, unless the caller says otherwise: several servers share a small
# machine, and vLLM would bind each of them to the same core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Forked processes do not import everything again. As of `make serve`.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


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
    """A server's answer: a completion's ``token_ids`` or a chat's ``text`` if the status is 200."""

    status: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    num_tokens: int = 0
    error: str = ""
    seconds: float = 0.0


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
        response, reply = self._post("/v1/completions", {"return_token_ids": True} | body)
        if not reply:
            return response
        return replace(response, token_ids=tuple(reply["choices"][0]["token_ids"]))

    def chat(self, prompt: str, max_tokens: int) -> Response:
        """POST one user message to /v1/chat/completions and wait."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        response, reply = self._post("/v1/chat/completions", body)
        if not reply:
            return response
        text = reply["choices"][0]["message"]["content"] or ""
        return replace(response, text=text, num_tokens=reply["usage"]["completion_tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> tuple[Response, dict[str, Any]]:
        """Status, seconds and error, and the reply, which is empty unless the status is 200."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps({"model": self.options.model} | body).encode(),
            headers={"Content-Type": "application/json"},
        )
        start = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
                reply = json.load(answer)
            return Response(200, seconds=time.monotonic() - start), reply
        except urllib.error.HTTPError as error:
            return Response(error.code, error=error.read().decode(errors="replace")[:500]), {}
        except OSError as error:
            return Response(0, error=str(error)), {}

    def canvas_positions(self) -> float:
        """Canvas positions evaluated so far, by vLLM's counter; 0 for a model without canvases."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=READY_TIMEOUT_S) as response:
            return counter(response.read().decode(), POSITIONS)

    def cpu_seconds(self) -> float:
        """Processor time used so far by the server and the processes it started."""
        ticks = 0
        for process in self._processes():
            fields = _read(process / "stat").rpartition(")")[2].split()
            if fields:  # else it ended meanwhile
                ticks += int(fields[11]) + int(fields[12])  # utime, stime
        return ticks / os.sysconf("SC_CLK_TCK")

    def reset_peak_memory(self) -> None:
        """Let ``peak_memory_mib`` start from what is resident now (Linux, clear_refs 5)."""
        for process in self._processes():
            with contextlib.suppress(OSError):
                (process / "clear_refs").write_text("5")

    def peak_memory_mib(self) -> float:
        """Largest resident set since the last reset, summed over the server's processes, MiB.

        Pages that forked processes share are counted in each of them.
        """
        sizes = (re.search(r"VmHWM:\s+(\d+) kB", _read(p / "status")) for p in self._processes())
        return sum(int(size[1]) for size in sizes if size) / 1024

    def _processes(self) -> list[Path]:
        """``/proc/PID`` of the server and of the processes it started: its session."""
        assert self._process is not None, "start() first"
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            fields = _read(process / "stat").rpartition(")")[2].split()
            if fields and int(fields[3]) == self._process.pid:
                found.append(process)
        return found

    def pause(self) -> None:
        """Let all of its processes stand still: one that waits for work polls, and takes a core."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the process and what is left of its group."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


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


def _read(path: Path) -> str:
    """A file of ``/proc``, or nothing if its process ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


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
