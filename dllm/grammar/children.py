"""Processes that compile grammars, so that one that takes too much time or memory can be ended.

xgrammar's compiler cannot be interrupted, and grammars of a few kilobytes keep it, or our search
for states, busy for minutes or take gigabytes. So each is compiled in a child of its own, with the
lowest priority, which ends itself when it takes too long. Children are forked from one process that
has everything loaded (`child`).
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dllm
from dllm.grammar.automaton import TooSlow, Unsupported
from dllm.grammar.packing import OUT_OF_MEMORY, REFUSAL, TABLE
from dllm.grammar.vocabulary import Vocabulary

SECONDS = 10.0  # for one grammar
MOST_MEMORY = 1 << 30  # bytes for one grammar


class Children:
    """Of one vocabulary; for any number of threads.

    Args:
        seconds: for one grammar, without the start of the first process.
        most_memory: bytes for one grammar.
    """

    def __init__(
        self, vocabulary: Vocabulary, seconds: float = SECONDS, most_memory: int = MOST_MEMORY
    ) -> None:
        self.seconds = seconds
        self.most_memory = most_memory
        self._vocabulary = vocabulary
        self._starting = threading.Lock()
        self.forking: subprocess.Popen[bytes] | None = None  # the process that forks
        self._control: socket.socket | None = None  # to it

    def table(self, request: Mapping[str, Any]) -> bytes:
        """The table that a request asks for (`child`).

        Raises:
            Unsupported: the grammar is refused.
            TooSlow: it took too long.
            ChildProcessError: two processes failed with it.
        """
        # A second time, if one was killed from outside.
        answer = self._ask(request) or self._ask(request)
        kind, content = answer[:1], answer[1:]
        if kind == TABLE:
            return content
        if kind == REFUSAL:
            raise Unsupported(content.decode())
        if kind == OUT_OF_MEMORY:
            raise Unsupported(
                f"The grammar took more than {self.most_memory >> 20} MiB to compile. Make it "
                "smaller: fewer properties, choices and repetitions."
            )
        raise ChildProcessError("The grammar's compiler failed twice. Change the grammar.")

    def _ask(self, request: Mapping[str, Any]) -> bytes:
        """The answer of a child; empty if there is none."""
        ours, theirs = multiprocessing.Pipe()
        with ours:
            with theirs, self._starting:
                try:
                    control = self._running()
                    begun = time.monotonic()  # before the child begins
                    socket.send_fds(control, [b"!"], [theirs.fileno()])
                except OSError:
                    return b""
            try:
                ours.send_bytes(json.dumps(request).encode())
                return ours.recv_bytes()
            except (EOFError, OSError):
                if time.monotonic() - begun < self.seconds:
                    return b""
                raise TooSlow(
                    f"The grammar took more than {self.seconds:g} s to compile. Make it smaller: "
                    "fewer choices and repetitions, less nesting."
                ) from None

    def _running(self) -> socket.socket:
        """The way to the process that forks, which is started when there is none: in 2 to 3 s."""
        if self._control is None or self.forking is None or self.forking.poll() is not None:
            self.close()
            self._control, theirs = socket.socketpair()
            path = [str(Path(dllm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            limits = [str(self.seconds), str(self.most_memory)]
            with theirs:
                self.forking = subprocess.Popen(
                    [sys.executable, "-P", "-m", "dllm.grammar.child", *limits],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                    process_group=0,
                )
            connection = Connection(os.dup(self._control.fileno()))
            with connection:
                connection.send_bytes(self._vocabulary.to_bytes())
            if not self._control.recv(1):
                raise OSError("the process that compiles grammars does not start")
        return self._control

    def close(self) -> None:
        """End them all."""
        if self._control is not None and self.forking is not None:
            self._control.close()
            self.forking.wait()
        self._control = self.forking = None
