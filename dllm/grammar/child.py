"""What runs in the process that compiles grammars (`children` says why there is one).

A request is a line of JSON: the fields of a `Spec`, and ``most_states``.
An answer is a byte for its kind, eight for its length, and a message or the arrays of a table.
"""

import json
import os
import resource
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import xgrammar

from dllm.grammar.automaton import Automaton, Unsupported
from dllm.grammar.packing import HEADER, OUT_OF_MEMORY, REFUSAL, TABLE
from dllm.grammar.reach import ByteTable, nearest

SHOWN = 300  # characters of a message of xgrammar


def main(seconds: float, most_memory: int) -> None:
    """Answer requests until the pipe is closed.

    Args:
        seconds: after so many with one request the process ends.
        most_memory: bytes, in addition to those of the idle process.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints gets among the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the pipe is closed
    os.nice(19)
    threading.Thread(target=_end_with_pipe, daemon=True).start()
    # Which tokens there are does not matter: only the automaton over bytes is read.
    info = xgrammar.TokenizerInfo([b"a", b""], vocab_size=2, stop_token_ids=[1])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + most_memory, used + most_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process, also inside of C++
        try:
            kind, answer = TABLE, explore(compiler, **json.loads(line)).to_bytes()
        except Unsupported as refusal:
            kind, answer = REFUSAL, str(refusal).encode()
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(HEADER.pack(kind, len(answer)) + answer)
        answers.flush()


def _end_with_pipe() -> None:
    """End, also amid a grammar, when nobody can ask any more: the asking process may be killed."""
    pipe = select.poll()
    pipe.register(sys.stdin.fileno(), 0)  # wakes up when the other end is closed
    pipe.poll()
    os._exit(0)


def explore(compiler: xgrammar.GrammarCompiler, most_states: int, **spec: Any) -> ByteTable:
    """The states of a grammar."""
    try:
        serialized = _compile(compiler, **spec).serialize_json()
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise Unsupported(f"xgrammar does not compile the grammar: {str(error)[:SHOWN]}") from error
    kind = spec["kind"]
    made = Automaton(serialized, is_json=kind == "json", is_tag=kind == "structural_tag")
    return nearest(made, most_states)


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
