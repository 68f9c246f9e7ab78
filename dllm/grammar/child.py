"""What runs in the processes that compile grammars (`children` says why there are such).

One process loads xgrammar and the vocabulary, says so with one byte, and waits for sockets. For
each of them it forks a child, which reads one request there, answers, and ends.

A request is JSON: the fields of a `Spec`, ``most_states`` and ``absent``, tokens that are in no
text. An answer is a letter for its kind, and a table or a message.
"""

import json
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xgrammar

from dllm.grammar.automaton import Automaton, Unsupported
from dllm.grammar.packing import OUT_OF_MEMORY, REFUSAL, TABLE
from dllm.grammar.reach import nearest
from dllm.grammar.table import by_tokens
from dllm.grammar.vocabulary import Vocabulary

SHOWN = 300  # characters of a message of xgrammar


def main(seconds: float, most_memory: int) -> None:
    """Fork a child for every socket that comes in, until nobody can send one.

    The vocabulary comes first. This process leads a group of its own, in which its children are.

    Args:
        seconds: after so many a child ends.
        most_memory: bytes, in addition to those of this process.
    """
    os.nice(19)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=sys.stdin.fileno())
    vocabulary = Vocabulary.from_bytes(Connection(os.dup(control.fileno())).recv_bytes())
    _ = vocabulary.trie, vocabulary.is_text  # made once, and shared with all children
    # Which tokens xgrammar knows does not matter: only its automaton over bytes is read.
    info = xgrammar.TokenizerInfo([b"a", b""], vocab_size=2, stop_token_ids=[1])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    control.sendall(b"!")
    while True:
        _, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not sockets:  # the process that asks has ended: so do all that work for it
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends it, also inside of C++
            used = int(Path("/proc/self/statm").read_text().split()[0])
            most = used * os.sysconf("SC_PAGE_SIZE") + most_memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            connection = Connection(sockets[0])
            connection.send_bytes(_answer(compiler, vocabulary, connection.recv_bytes()))
            os._exit(0)
        os.close(sockets[0])


def _answer(compiler: xgrammar.GrammarCompiler, vocabulary: Vocabulary, request: bytes) -> bytes:
    try:
        return TABLE + table_of(compiler, vocabulary, **json.loads(request))
    except Unsupported as refusal:
        return REFUSAL + str(refusal).encode(errors="replace")
    except MemoryError:
        return OUT_OF_MEMORY


def table_of(
    compiler: xgrammar.GrammarCompiler,
    vocabulary: Vocabulary,
    most_states: int,
    absent: list[int],
    **spec: Any,
) -> bytes:
    """The table of a grammar (``Table.to_bytes``), without texts that have ``absent`` tokens."""
    try:
        serialized = _compile(compiler, **spec).serialize_json()
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise Unsupported(f"xgrammar does not compile the grammar: {str(error)[:SHOWN]}") from error
    kind = spec["kind"]
    made = Automaton(serialized, is_json=kind == "json", is_tag=kind == "structural_tag")
    return by_tokens(nearest(made, most_states), vocabulary).without(absent).to_bytes()


def _compile(
    compiler: xgrammar.GrammarCompiler,
    kind: str,
    text: str,
    any_whitespace: bool,
    separators: list[str] | None,
) -> xgrammar.CompiledGrammar:
    """As vLLM's backend does it."""
    if kind == "json":
        between = (separators[0], separators[1]) if separators else None
        return compiler.compile_json_schema(text, any_whitespace=any_whitespace, separators=between)
    if kind == "structural_tag":
        given = json.loads(text)
        if "structures" not in given:
            return compiler.compile_structural_tag(text)
        tags = [
            xgrammar.StructuralTagItem(
                begin=tag["begin"], schema=json.dumps(tag["schema"]), end=tag["end"]
            )
            for tag in given["structures"]
        ]
        return compiler.compile_structural_tag(tags, given["triggers"])
    if kind == "regex":
        return compiler.compile_regex(text)
    return compiler.compile_lark(text) if kind == "lark" else compiler.compile_grammar(text)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
