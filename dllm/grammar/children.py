"""Processes that compile grammars, so that one that takes too much time or memory can be ended.

Grammars of a few kilobytes keep xgrammar's parser, which cannot be interrupted, or our search for
states busy for minutes, or take gigabytes. So each is compiled in a child of its own, with the
lowest priority, which ends itself when it takes too long.

Children are forked from one process, which this module is when it runs as a program. That one loads
xgrammar and the vocabulary, says so with one byte, and waits for sockets. For each of them it forks
a child, which reads one request there, answers, and ends. A request is JSON: the fields of a
`Spec`, ``most_states``, ``absent`` (tokens that are in no text), and ``marks`` (of `by_tokens`).
An answer is a letter for its kind, and a table or a message.
"""

import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
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
from dllm.grammar.automaton import Automaton
from dllm.grammar.counts import nearest_counted
from dllm.grammar.refusals import TooSlow, Unsupported
from dllm.grammar.table import by_tokens
from dllm.grammar.tags import lower_text
from dllm.grammar.vocabulary import Vocabulary

logger = logging.getLogger(dllm.LOGGER)

SECONDS = 10.0  # of a processor, for one grammar
PATIENCE = 6  # times as long by the clock: the lowest priority gets little of a busy machine
MOST_MEMORY = 1 << 28  # bytes for one grammar
SHOWN = 300  # characters of a message of xgrammar
TABLE, REFUSAL, OUT_OF_MEMORY = b"T", b"R", b"M"  # kinds of answers


class Children:
    """The processes that compile grammars for one vocabulary; for any number of threads.

    Args:
        seconds: of a processor, for one grammar; ``patience`` times as long by the clock.
        most_memory: bytes for one grammar.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        seconds: float = SECONDS,
        most_memory: int = MOST_MEMORY,
        patience: float = PATIENCE,
    ) -> None:
        self.seconds = seconds
        self.most_memory = most_memory
        self.patience = patience
        self._vocabulary = vocabulary
        self._starting = threading.Lock()
        self.forking: subprocess.Popen[bytes] | None = None  # the process that forks
        self._control: socket.socket | None = None  # to it

    def table(self, request: Mapping[str, Any]) -> bytes:
        """The table that a request asks for.

        Raises:
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
                waited = time.monotonic() - begun
                if waited < self.seconds:  # no time is over: it was killed
                    return b""
                if waited >= self.patience * self.seconds:
                    raise TooSlow(
                        f"The grammar was not compiled in {waited:.0f} s: the machine is busy. "
                        "Send it again, or make it smaller."
                    ) from None
                raise TooSlow(
                    f"The grammar took more than {self.seconds:g} s of a processor to compile. "
                    "Make it smaller: fewer choices and repetitions, less nesting."
                ) from None

    def _running(self) -> socket.socket:
        """A socket to the process that forks, which is started if there is none: in 2 to 3 s."""
        if self.forking is not None and (code := self.forking.poll()) is not None:
            logger.warning("What compiles grammars ended with exit code %d; it starts again", code)
            self.close()
        if self._control is None or self.forking is None:
            self._control, theirs = socket.socketpair()
            path = [str(Path(dllm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            limits = map(str, (self.seconds, self.most_memory, self.patience))
            with theirs:
                self.forking = subprocess.Popen(
                    [sys.executable, "-P", "-m", "dllm.grammar.children", *limits],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                    process_group=0,
                )
            with Connection(os.dup(self._control.fileno())) as connection:
                connection.send_bytes(self._vocabulary.to_bytes())
            if not self._control.recv(1):
                raise OSError("the process that compiles grammars does not start")
        return self._control

    def close(self) -> None:
        if self._control is not None and self.forking is not None:
            self._control.close()
            self.forking.wait()
        self._control = self.forking = None


def main(seconds: float, most_memory: int, patience: float) -> None:
    """Fork a child for every socket that comes in, until nobody can send one.

    The vocabulary comes first. This process leads a group of its own, in which its children are.
    The limits are those of `Children`; memory counts in addition to that of this process.
    """
    import xgrammar  # noqa: F401  it imports PyTorch, once for all children

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=sys.stdin.fileno())
    vocabulary = Vocabulary.from_bytes(Connection(os.dup(control.fileno())).recv_bytes())
    _ = vocabulary.trie, vocabulary.is_text  # made once, and shared with all children
    gc.disable()  # it reads all that this process has imported, and a child ends soon
    # Behind the imports, for which the first request waits. Beside processes that keep every core
    # busy, a child still gets a quarter of one: its limit counts what it uses, not its waits.
    os.nice(5)
    control.sendall(b"!")
    while True:
        _, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not sockets:  # the process that asks has ended: so do all that work for it
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            end_after(seconds, patience)
            used = int(Path("/proc/self/statm").read_text().split()[0])
            most = used * os.sysconf("SC_PAGE_SIZE") + most_memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            connection = Connection(sockets[0])
            connection.send_bytes(_answer(vocabulary, connection.recv_bytes()))
            os._exit(0)
        os.close(sockets[0])


def end_after(seconds: float, patience: float) -> None:
    """End this process by SIGPROF or SIGALRM, also inside of C++, when its time is over."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, patience * seconds)


def _answer(vocabulary: Vocabulary, request: bytes) -> bytes:
    try:
        return TABLE + table_of(vocabulary, **json.loads(request))
    except Unsupported as refusal:
        return REFUSAL + str(refusal).encode(errors="replace")
    except RecursionError:
        return REFUSAL + b"The schema is nested too deeply. Make it flatter."
    except MemoryError:
        return OUT_OF_MEMORY


def table_of(
    vocabulary: Vocabulary, most_states: int, absent: list[int], marks: list[int], **spec: Any
) -> bytes:
    """The table of a grammar (``Table.to_bytes``), without texts that have ``absent`` tokens."""
    spec["text"] = lower_text(spec["kind"], spec["text"])
    try:
        serialized = grammar_of(**spec).serialize_json()
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise Unsupported(f"xgrammar does not read the grammar: {str(error)[:SHOWN]}") from error
    # States stay apart where there are marks: the way there shows their places.
    states = nearest_counted(Automaton(serialized, is_merged=not marks), most_states)
    return by_tokens(states, vocabulary, marks, most_states).without(absent).to_bytes()


def grammar_of(
    kind: str, text: str, any_whitespace: bool = True, separators: list[str] | None = None
) -> Any:
    """The grammar that xgrammar makes of a text; the arguments are those of `compile.Spec`."""
    from xgrammar import Grammar, StructuralTagItem

    if kind == "json":
        between = (separators[0], separators[1]) if separators else None
        return Grammar.from_json_schema(text, any_whitespace=any_whitespace, separators=between)
    if kind == "structural_tag":
        given = json.loads(text)
        if not isinstance(given, dict) or "structures" not in given:
            return Grammar.from_structural_tag(text)
        try:
            tags = [
                StructuralTagItem(
                    begin=tag["begin"], schema=json.dumps(tag["schema"]), end=tag["end"]
                )
                for tag in given["structures"]
            ]
            return Grammar.from_structural_tag(tags, given["triggers"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unsupported(
                "The structural tag has no 'triggers' (texts) and 'structures' (of 'begin', "
                "'schema' and 'end'). Correct it."
            ) from error
    if kind == "regex":
        tag = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
        return Grammar.from_structural_tag(json.dumps(tag))
    return Grammar.from_lark(text) if kind == "lark" else Grammar.from_ebnf(text)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
