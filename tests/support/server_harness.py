"""Starts and stops ``vllm serve`` for tests, on a free port.

Files with ``pytest_plugins = ["tests.support.server_harness"]`` share one server of random weights,
the fixture ``server``.
"""

import ctypes
import functools
import http.client
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from bench.servers import ServerProcess
from tests.support.patience import HANG_S
from tests.support.process import python_path

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"

MODEL = "tiny"
CANVAS = 32
MAX_MODEL_LEN = 512
VOCAB_SIZE = 512
# Less than one prompt of the tests, so that prompts come in chunks. Less than eight canvases, so
# that a busy step does not have room for every canvas.
MAX_NUM_BATCHED_TOKENS = 128

COMMON_FLAGS = (
    f"--served-model-name={MODEL}",
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=8",
)
# Every frame of a watched canvas, however fast the machine is, and engine steps of several denoise
# steps, however slow.
ANY_MACHINE = {"canvas_frames_per_s": 1000, "denoise_loop_ms": 500}
FLAGS = (
    *COMMON_FLAGS,
    f"--max-num-batched-tokens={MAX_NUM_BATCHED_TOKENS}",
    f"--additional-config={json.dumps({'dllm': ANY_MACHINE})}",
)
# Of the server that many files share.
SHARED_FLAGS = (
    *FLAGS,
    "--middleware=tests.support.loop_gap.LoopGap",
    "--enable-auto-tool-choice",
    "--tool-call-parser=gemma4",
)
MAX_WATCHERS = 16  # the default of canvas_watchers
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # another server may run on this machine
    # As `make serve`: a spawned process imports everything again. test_kills.py does both.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # Clients close idle connections after 5 s; a server that does so, too, may do it first.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
}


class Reply(NamedTuple):
    status: int
    text: str

    @property
    def message(self) -> str:
        """The ``error.message`` of a refusal."""
        return str(json.loads(self.text)["error"]["message"])

    @property
    def parameter(self) -> str | None:
        """The ``error.param`` of a refusal: the name of what is refused."""
        error = json.loads(self.text).get("error", {})
        return str(error["param"]) if error.get("param") is not None else None


class Server(ServerProcess):
    """A process ``vllm serve CHECKPOINT``; leaving a ``with`` block stops it.

    Args:
        port: of ``reserve_port``; closed when the server is stopped.
        command: ends where the checkpoint comes; None: ``vllm serve`` of this environment.
    """

    ready_s = stop_s = HANG_S

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        flags: Sequence[str] = FLAGS,
        environment: Mapping[str, str] | None = None,
        port: socket.socket | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        inherited = {key: value for key, value in os.environ.items() if key not in _OF_THIS_PROCESS}
        given = inherited | ENVIRONMENT | dict(environment or {})
        super().__init__("vllm serve", str(checkpoint), log, flags, given, port, command)
        self.start(_die_with_parent)

    def client(self) -> openai.OpenAI:
        """One for all callers: each new one reads the system's certificates."""
        return self._client

    @functools.cached_property
    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
        )

    def post(self, path: str, body: Any, content_type: str = "application/json") -> Reply:
        """POST a body that no client library would send: bytes as they are, all else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": content_type}
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as response:
                return Reply(response.status, response.read().decode())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(errors="replace"))

    def ask(self, path: str, body: Any) -> Any:
        """The JSON that a request gets which is served."""
        reply = self.post(path, body)
        assert reply.status == 200, reply.text
        return json.loads(reply.text)

    def get(self, path: str) -> Reply:
        with urllib.request.urlopen(self.url + path, timeout=HANG_S) as response:
            return Reply(response.status, response.read().decode())

    def metrics(self, *names: str) -> list[float]:
        """Metrics by name, summed over their labels."""
        lines = self.get("/metrics").text.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line))
            for name in names
        ]

    def sent(self, path: str, body: Any) -> http.client.HTTPConnection:
        """A connection on which a body has been posted, and no answer been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def serving(
    checkpoint: Path,
    folders: pytest.TempPathFactory,
    flags: Sequence[str] = FLAGS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that is ready, for a fixture: ``yield from serving(...)``."""
    with Server(checkpoint, folders.mktemp("server") / "log", flags, environment) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="session")
def server(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The shared server: random weights, a small token budget."""
    environment = {"PYTHONPATH": python_path(CHECKPOINTS.parent)}
    yield from serving(checkpoint(), tmp_path_factory, SHARED_FLAGS, environment)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def ask_chat(client: openai.OpenAI, text: str, model: str = MODEL, **options: Any) -> Any:
    """The answer to a question of the user, or the stream of it."""
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **options)


# Variables that engine_harness and tests set for this process, and a server must not inherit.
_OF_THIS_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "DLLM_DISABLE", "VLLM_PLUGINS")


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child process: if the test run is killed, Linux ends the server, too."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
