"""Processes that compile grammars, so that one that takes too much time or memory can be ended.

xgrammar's compiler cannot be interrupted, and grammars of a few kilobytes keep it, or our search
for states, busy for minutes or take gigabytes. A child compiles one grammar after the other, with
the lowest priority, and ends itself when one takes too long; another one is started in its place.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import dllm
from dllm.grammar.automaton import TooSlow, Unsupported
from dllm.grammar.packing import HEADER, OUT_OF_MEMORY, TABLE
from dllm.grammar.reach import ByteTable

SECONDS = 10.0  # for one grammar
MOST_MEMORY = 1 << 30  # bytes for one grammar
MOST_CHILDREN = 2  # at once; further requests wait


class Children:
    """Started when they are needed, and kept; for any number of threads.

    Args:
        seconds: for one grammar, without the start of a process.
        most_memory: bytes for one grammar.
    """

    def __init__(self, seconds: float = SECONDS, most_memory: int = MOST_MEMORY) -> None:
        self.seconds = seconds
        self.most_memory = most_memory
        self._may_run = threading.BoundedSemaphore(MOST_CHILDREN)
        self._idle: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one ahead: it takes 2 to 3 s, most of it to import PyTorch for xgrammar."""
        if not self._idle:
            self._idle.append(self._new())

    def explore(self, request: dict[str, Any]) -> ByteTable:
        """The answer to a request (`child`).

        Raises:
            Unsupported: the grammar is refused.
            TooSlow: it took too long.
            ChildProcessError: two processes failed with it.
        """
        with self._may_run:
            try:
                return self._explore(request)
            except ChildProcessError:  # killed from outside, perhaps before it was asked
                return self._explore(request)

    def _explore(self, request: dict[str, Any]) -> ByteTable:
        child = self._idle.pop() if self._idle else self._new()
        try:
            is_table, answer = self._ask(child, request)
        except BaseException:
            _end(child)
            self.start()  # others need not wait for it
            raise
        self._idle.append(child)
        if not is_table:
            raise Unsupported(answer.decode())
        return ByteTable.from_bytes(answer)

    def close(self) -> None:
        """End those that are idle."""
        while self._idle:
            _end(self._idle.pop())

    def _new(self) -> subprocess.Popen[bytes]:
        path = [str(Path(dllm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        limits = [str(self.seconds), str(self.most_memory)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dllm.grammar.child", *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        )

    def _ask(self, child: subprocess.Popen[bytes], request: dict[str, Any]) -> tuple[bool, bytes]:
        """(whether the answer is a table, the answer)."""
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            kind, length = HEADER.unpack(_read(child.stdout, HEADER.size))
            return kind == TABLE, _read(child.stdout, length)
        except (EOFError, BrokenPipeError):
            status = child.wait()
        if status == -signal.SIGALRM:
            raise TooSlow(
                f"The grammar took more than {self.seconds:g} s to compile. Make it smaller: fewer "
                "choices and repetitions, less nesting."
            )
        if status == OUT_OF_MEMORY:
            raise Unsupported(
                f"The grammar took more than {self.most_memory >> 20} MiB to compile. Make it "
                "smaller: fewer properties, choices and repetitions."
            )
        raise ChildProcessError(f"the grammar's compiler ended with status {status}")


def _read(stream: IO[bytes], length: int) -> bytes:
    found = stream.read(length)
    if len(found) < length:
        raise EOFError
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
