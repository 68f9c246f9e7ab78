"""Draft workers that come and go: NVIDIA Dynamo lists them, for targets that follow the list.

Dynamo's runtime lives in a child process (``dynamo_process``), because it pins packages at other
versions than vLLM does. The child ends with this process, so a worker that is killed leaves the
list at once. Only addresses go through Dynamo; drafts go over ``stream``, with its keys.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dllm import LOGGER
from dllm.remote import dynamo_process
from dllm.remote.address import Address, parse
from dllm.remote.client import Client
from dllm.remote.link import Link
from dllm.settings.files import beside

logger = logging.getLogger(LOGGER)

PYTHON_VARIABLE = "DLLM_DYNAMO_PYTHON"
PACKAGE = "ai-dynamo-runtime"
RESTART_S = 1.0
READY_WITHIN_S, END_WITHIN_S = 60.0, 10.0
MAX_WORKERS = 256


def find_python() -> str:
    """Raises ValueError if none has Dynamo's runtime."""
    given = os.environ.get(PYTHON_VARIABLE)
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(f"{PYTHON_VARIABLE}={given}: there is no such file.")
        return given
    if importlib.util.find_spec("dynamo") is not None:
        return sys.executable
    if (python := beside("dynamo")) is not None:
        return str(python)
    raise ValueError(
        f"discovery by Dynamo needs {PACKAGE}. In a checkout run: make setup-dynamo. Elsewhere: "
        f"python3 -m venv dynamo-env; dynamo-env/bin/pip install {PACKAGE}; and name it: "
        f"{PYTHON_VARIABLE}=dynamo-env/bin/python"
    )


class Child:
    """A process that prints lists of addresses; started again, after a pause, when it ends.

    ``command`` prints a JSON list in each line, and ends when its standard input does.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.addresses: list[str] | None = None  # the last list; another object each time
        self._command = list(command)
        self._has_spoken, self._is_closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # it is not started again once it is closed
        self._process = self._start()
        threading.Thread(target=self._follow, name="discovery", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises ValueError: no list came in time."""
        if not self._has_spoken.wait(READY_WITHIN_S):
            self.close()
            raise ValueError(f"discovery: no answer within {READY_WITHIN_S:.0f} s. See its errors.")

    def close(self) -> None:
        """What it listed is gone when this returns; of one that hangs, when Dynamo's lease ends."""
        with self._lock:
            self._is_closed.set()
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        # A session of its own: what interrupts this process is not for it.
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip

    def _follow(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._read(line)
            code = self._process.wait()
            if self._is_closed.wait(RESTART_S):
                return
            logger.warning("discovery ended with exit code %d; it is started again", code)
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._process = self._start()

    def _read(self, line: str) -> None:
        try:
            listed = json.loads(line)
        except ValueError:
            listed = None
        if not isinstance(listed, list):
            logger.warning("discovery: no list of addresses: %.200s", line.rstrip())
            return
        self.addresses = [str(each) for each in listed][:MAX_WORKERS]
        self._has_spoken.set()


def watch_dynamo() -> Child:
    """A child that lists the draft workers that Dynamo knows."""
    return Child([find_python(), "-I", dynamo_process.__file__, "watch"])


def list_with_dynamo(address: str) -> Child:
    """A child that puts a draft worker onto Dynamo's list, for as long as the child runs."""
    return Child([find_python(), "-I", dynamo_process.__file__, "serve", address])


class Following:
    """Lets a target use the workers that Dynamo lists; without ``keys`` those of Unix sockets.

    Sessions stay with their worker while it is listed; those of a worker that left go to the
    others. While Dynamo itself is away the last list is used.
    """

    def __init__(self, child: Child, link: Callable[[Address], Link], keys: str | None) -> None:
        self._child, self._link, self._keys = child, link, keys
        self._seen: list[str] | None = None

    def update(self, client: Client) -> None:
        """Let ``client`` use the workers that are listed now. Called in its thread."""
        listed = self._child.addresses
        if listed is None or listed is self._seen:
            return
        self._seen = listed
        there = {link.address: link for link in client.links}
        found = [there.get(each) or self._linked(each) for each in dict.fromkeys(listed)]
        client.use([link for link in found if link is not None])
        logger.info("discovery: draft workers: %s", [link.address for link in client.links])

    def _linked(self, given: str) -> Link | None:
        """The link to a worker; None for an address that is not used, which is logged."""
        try:
            address = parse(given, self._keys, "a draft worker")
            if not address.is_numeric:  # to ask a name server would stop the target meanwhile
                raise ValueError("a name, and not a machine's number")
            return self._link(address)
        except ValueError as error:
            logger.warning("discovery: %r is not used: %s", given, error)
            return None
