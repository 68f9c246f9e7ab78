"""JSON schemas of the real world: how many are served, and whether what is served is right.

``python -m bench.schemas FOLDER TOKENIZER`` reads the files of MaskBench in FOLDER (each a
``schema`` and ``tests`` with ``data`` and ``valid``) and prints a table: our tables beside
llguidance and xgrammar, as vLLM lets schemas through to them. An instance is accepted if it is in
some order of its keys; each part of its text is spelled by the tokenizer's own tokens. The search
is that of a denoise step on a CPU, for the best text on a canvas of 64 places with drawn logits.
"""

import argparse
import collections
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dllm.grammar import children
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import MOST_STATES, Table
from dllm.grammar.viterbi import UNLIMITED, Canvas

PLACES, ROUNDS = 64, 5  # of a canvas whose best text is searched, and how often
MOST_TRIES = 3000  # parts of one instance, in all orders of its keys
SECONDS = 60  # of a processor, for one schema and its instances in one engine
Advance = Callable[[Any, str], Any]  # the state behind a text, None if it is not allowed


def spellings(value: Any) -> Iterator[str]:
    """The texts of a value without members; numbers also without an exponent."""
    yield json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        yield f"{value:.6f}".rstrip("0").rstrip(".")
    elif isinstance(value, str):
        yield json.dumps(value)


class Walk:
    """Reads one instance, in any order of its keys, as far as MOST_TRIES parts go."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._tries = advance, 0

    def ends(self, state: Any, value: Any, text: str = "") -> Iterator[Any]:
        """The states behind a value with a text in front of it."""
        self._tries += 1
        if self._tries > MOST_TRIES:
            return
        if isinstance(value, dict | list) and value:
            opened = self._advance(state, text + ("{" if isinstance(value, dict) else "["))
            if opened is not None:
                inner: Any = self._members if isinstance(value, dict) else self._items
                yield from inner(opened, value, "")
        else:
            for spelled in spellings(value):
                if (behind := self._advance(state, text + spelled)) is not None:
                    yield behind

    def _items(self, state: Any, items: list[Any], comma: str) -> Iterator[Any]:
        if not items:
            if (behind := self._advance(state, "]")) is not None:
                yield behind
            return
        for behind in self.ends(state, items[0], comma):
            yield from self._items(behind, items[1:], ",")

    def _members(self, state: Any, members: dict[str, Any], comma: str) -> Iterator[Any]:
        if not members and (behind := self._advance(state, "}")) is not None:
            yield behind
        for name, value in members.items():
            if (named := self._advance(state, f"{comma}{json.dumps(name)}:")) is not None:
                rest = {other: one for other, one in members.items() if other != name}
                for behind in self.ends(named, value):
                    yield from self._members(behind, rest, ",")


def ordered(value: Any, schema: str) -> Any:
    """A value with its keys in the order in which a schema's text names them."""
    if isinstance(value, list):
        return [ordered(one, schema) for one in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: schema.find(json.dumps(name) + ":") % len(schema))
    return {name: ordered(value[name], schema) for name in names}


def judged(tests: list[dict[str, Any]], start: Any, advance: Advance, may_end: Any) -> list[Any]:
    """[is valid, is accepted] of each instance."""
    sys.setrecursionlimit(20_000)
    return [
        [
            test["valid"],
            any(may_end(end) for data in test["orders"] for end in Walk(advance).ends(start, data)),
        ]
        for test in tests
    ]


class Ours:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        from dllm.grammar.compile import tokens_of
        from dllm.grammar.vocabulary import Vocabulary

        tokens = tokens_of(tokenizer, vocab_size)
        self.encode = tokenizer.encode
        self.absent = sorted({*tokens.names, tokenizer.eos_token_id})
        self.vocabulary = Vocabulary(tokens.words)
        _ = self.vocabulary.trie, self.vocabulary.is_text

    def compile(self, schema: Any) -> Any:
        asked: dict[str, Any] = {"kind": "json", "text": json.dumps(schema), "marks": []}
        asked |= {"any_whitespace": True, "separators": None, "absent": self.absent}
        table = children.table_of(self.vocabulary, most_states=MOST_STATES, **asked)
        return Table.from_bytes(table)

    def judge(self, table: Table, tests: list[Any]) -> list[Any]:
        def advance(state: int, text: str) -> int | None:
            behind = table.read(state, self.encode(text, add_special_tokens=False))
            return behind if behind >= 0 else None

        return judged(tests, 0, advance, lambda state: bool(table.accepts[state]))

    def search_ms(self, table: Table) -> float:
        canvas = Canvas(table, self.absent)
        draws, took = np.random.default_rng(0), []
        for _ in range(ROUNDS):
            scores = draws.normal(size=(PLACES, len(table.class_of))).astype(np.float32)
            begun = time.process_time()
            canvas.best_path(scores, 0, UNLIMITED)
            took.append(1e3 * (time.process_time() - begun))
        return sorted(took)[ROUNDS // 2]


class Llguidance:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import llguidance.hf
        import vllm.v1.structured_output.backend_guidance  # noqa: F401  before time is counted

        self.tokens = llguidance.hf.from_tokenizer(tokenizer)

    def compile(self, schema: Any) -> Any:
        import llguidance
        from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        text = serialize_guidance_grammar(StructuredOutputOptions.JSON, json.dumps(schema))
        matcher = llguidance.LLMatcher(self.tokens, text, log_level=0)
        if error := matcher.get_error():
            raise Unsupported(error)
        matcher.deep_copy().compute_bitmask()
        return matcher

    def judge(self, matcher: Any, tests: list[Any]) -> list[Any]:
        def advance(state: Any, text: str) -> Any:
            behind, tokens = state.deep_copy(), self.tokens.tokenize_str(text)
            return behind if behind.try_consume_tokens(tokens) == len(tokens) else None

        return judged(tests, matcher, advance, lambda state: state.deep_copy().is_accepting())


class Xgrammar:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import vllm.v1.structured_output.backend_xgrammar  # noqa: F401  before time is counted
        import xgrammar

        self.info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self.stop = tokenizer.eos_token_id

    def compile(self, schema: Any) -> Any:
        import xgrammar
        from vllm.v1.structured_output.backend_xgrammar import (
            has_xgrammar_unsupported_json_features,
        )

        if has_xgrammar_unsupported_json_features(schema):
            raise Unsupported("refused by vLLM")
        compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)
        try:
            return compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        except RuntimeError as error:
            raise Unsupported(str(error)) from error

    def judge(self, grammar: Any, tests: list[Any]) -> list[Any]:
        import xgrammar

        def advance(state: Any, text: str) -> Any:
            behind = state.fork()
            return behind if behind.accept_string(text) else None

        start = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=False)
        return judged(tests, start, advance, lambda state: state.fork().accept_token(self.stop))


def in_a_child(engine: Any, schema: Any, tests: list[Any]) -> dict[str, Any]:
    """What an engine makes of a schema, in a process with the limits of `children`.

    ``refused`` is a message, ``cpu`` seconds of a processor and ``memory`` MiB to compile, and
    ``tests`` the judged instances.
    """

    def work(answers: Any) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        gc.disable()  # as in `children`
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        status = Path("/proc/self/statm").read_text().split()
        most = int(status[0]) * os.sysconf("SC_PAGE_SIZE") + children.MOST_MEMORY
        if isinstance(engine, Ours):
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.process_time()
        found: dict[str, Any] = {}
        try:
            made = engine.compile(schema)
        except Unsupported as refusal:
            found["refused"] = str(refusal)
        except MemoryError:
            found["refused"] = "memory"
        found["cpu"] = time.process_time() - begun
        found["memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        if found["cpu"] > children.SECONDS:
            found["refused"] = "time"
        resource.setrlimit(resource.RLIMIT_AS, 2 * (resource.RLIM_INFINITY,))
        if "refused" not in found:
            found["tests"] = engine.judge(made, tests)
            if isinstance(engine, Ours):
                found["search"] = engine.search_ms(made)
        answers.send(found)
        os._exit(0)

    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"refused": "time or a crash", "cpu": float(SECONDS), "memory": 0.0}
    process.join()
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, str]:
    served = [one for one in found if "refused" not in one]
    tests = [one["tests"] for one in served]
    accepts = sum(any(is_in and not is_valid for is_valid, is_in in one) for one in tests)
    rejects = sum(any(is_valid and not is_in for is_valid, is_in in one) for one in tests)
    cpu, memory = ([one[key] for one in found] for key in ("cpu", "memory"))
    search = [one["search"] for one in served if "search" in one]
    return {
        "served": f"{len(served)} of {len(found)}",
        "schemas with an invalid instance that is accepted": str(accepts),
        "schemas with a valid instance that is not": str(rejects),
        "compile CPU p50 / p90 / max, s": " / ".join(
            f"{np.percentile(cpu, share):.2f}" for share in (50, 90, 100)
        ),
        "memory p90 / max, MiB": f"{np.percentile(memory, 90):.0f} / {max(memory):.0f}",
        "search of a canvas p50 / p90 / max, ms": " / ".join(
            f"{np.percentile(search, share):.1f}" for share in (50, 90, 100) if search
        ),
    }


ENGINES = {"dllm": Ours, "llguidance": Llguidance, "xgrammar": Xgrammar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", help="a folder with a tokenizer")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--details", type=Path, help="write a line of JSON for each schema here")
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer)
    names = asked.engines.split(",")
    engines = {name: ENGINES[name](tokenizer, len(tokenizer)) for name in names}
    found = collections.defaultdict(list)
    details = (asked.details or Path(os.devnull)).open("w")
    for path in sorted(asked.folder.glob("*.json")):
        case = json.loads(path.read_text())
        for test in case["tests"]:
            test["orders"] = [test["data"], ordered(test["data"], json.dumps(case["schema"]))]
        for name, engine in engines.items():
            found[name].append(in_a_child(engine, case["schema"], case["tests"]))
            line = {"name": path.stem, "engine": name} | found[name][-1]
            print(json.dumps(line), file=details, flush=True)
    sums = {name: summary(each) for name, each in found.items()}
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for row in sums[names[0]]:
        print(f"| {row} | {' | '.join(sums[name][row] for name in names)} |")


if __name__ == "__main__":
    main()
