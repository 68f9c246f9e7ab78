"""SIGKILL of the API server, under load: the others end, and nothing is left of it.

After how many seconds depends on the machine; how long they wait for each other is tested in
``tests/patches/test_lifetime.py``.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import psutil
import pytest

from bench.servers import reserve_port
from tests.support.patience import HANG_S
from tests.support.server_harness import FLAGS, MODEL, Server

pytestmark = pytest.mark.slow

CLIENTS = 3
# Three processes, and queues in shared memory between two of them.
KILL_FLAGS = (*FLAGS, "--distributed-executor-backend=mp")


class Place(NamedTuple):
    """What the servers share."""

    port: socket.socket
    sockets: Path


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not below pytest's folder: the path of a socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="dllm-kill-"))
    with reserve_port() as port:
        yield Place(port, folder)
    shutil.rmtree(folder)


def processes(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by what they do, without Python's resource tracker."""
    parent = psutil.Process(server.process.pid)
    found = {"API server": parent}
    for child in parent.children(recursive=True):
        title = " ".join(child.cmdline())
        for name, said in (("engine core", "EngineCore"), ("worker", "Worker")):
            if said in title:
                found[name] = child
    return found


class Ends:
    """Watches processes, of which not all are children of this one; leaving ``with`` closes it."""

    def __init__(self, watched: list[psutil.Process]) -> None:
        self.names = {os.pidfd_open(process.pid): process for process in watched}

    def alive_after(self, seconds: float) -> list[psutil.Process]:
        """Those that have not ended by then; one that nobody has waited for has ended, too."""
        deadline = time.monotonic() + seconds
        poll, left = select.poll(), dict(self.names)
        for handle in left:
            poll.register(handle, select.POLLIN)
        while left and (patience := deadline - time.monotonic()) > 0:
            for handle, _ in poll.poll(1000 * patience):
                poll.unregister(handle)
                del left[handle]
        return list(left.values())

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.names:
            os.close(handle)


def shared_memory(running: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that a server maps: of vLLM's queues."""
    found = set()
    for process in running:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= {Path(path) for path in re.findall(r"(/dev/shm/psm_\w+)$", maps, re.M)}
    return found


def stream_for_ever(server: Server, has_begun: threading.Barrier) -> str:
    """Read streams until one of them breaks; returns how it did."""
    client: Any = server.client()
    is_first = True
    try:
        while True:
            for _ in client.completions.create(
                model=MODEL, prompt="Sort these", max_tokens=300, stream=True,
                extra_body={"ignore_eos": True},
            ):  # fmt: skip
                if is_first:
                    has_begun.wait(HANG_S)
                is_first = False
    except (openai.APIError, urllib.error.URLError, OSError) as error:
        return str(error)
    except Exception as error:  # httpx's, of a connection that broke
        return f"{type(error).__name__}: {error}"


def slow_reader(server: Server) -> socket.socket:
    """A client that asks for a stream with many events, and does not read them."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": "a",
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
            "vllm_xargs": {"diffusion_stream": "canvas"},
        }
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", server.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_others_end_and_nothing_is_left(
    checkpoint: Callable[..., Path],
    place: Place,
    tmp_path: Path,
    method: str,
) -> None:
    environment = {
        "VLLM_RPC_BASE_PATH": str(place.sockets),
        "VLLM_WORKER_MULTIPROC_METHOD": method,
    }
    server = Server(checkpoint(), tmp_path / "log", KILL_FLAGS, environment, place.port.dup())
    with server, contextlib.ExitStack() as stack:
        server.wait_until_ready()
        running = processes(server)
        everything = [running["API server"], *running["API server"].children(recursive=True)]
        assert len(running) == 3
        memory = shared_memory(list(running.values()))
        sockets = list(place.sockets.rglob("*-*-*"))
        assert memory and sockets
        has_begun = threading.Barrier(CLIENTS + 1)
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        clients = [pool.submit(stream_for_ever, server, has_begun) for _ in range(CLIENTS)]
        stack.enter_context(slow_reader(server))
        has_begun.wait(HANG_S)

        ends = stack.enter_context(Ends(everything))
        running["API server"].kill()

        assert not ends.alive_after(HANG_S)
        assert [client.result(timeout=HANG_S) for client in clients]
        assert not [path for path in memory if path.exists()]
        assert not list(place.sockets.iterdir())
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", server.port))
            free.listen()  # fails if another process listens
        assert server.process.wait() == -signal.SIGKILL
