"""The table of a grammar: from memory, or compiled by a child process.

A grammar is refused if its text is too long, if it takes a child (`children`) too much time or
memory, if its states are too many, or if the tokens do too many different things.

A special token (``<eos>``, ``<|turn>``) is no text: a JSON string must not hold one, though its
name could be spelled there. Only the text of a structural tag may name special tokens, for instance
those around a tool call. Where it does, the token stands for its name, and no other tokens spell it
(`table`): parsers know a call by its token.
"""

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import prometheus_client
from cachetools import LRUCache

from dllm.grammar.children import Children
from dllm.grammar.refusals import TooSlow, Unsupported
from dllm.grammar.table import MOST_STATES
from dllm.grammar.tags import read_json, spoken
from dllm.grammar.vocabulary import Vocabulary

MOST_TEXT = 1 << 17  # bytes of a schema, regular expression or grammar
MOST_AT_ONCE = 2  # are compiled; others wait
MOST_WAITING = 16  # different ones; further ones are refused
MOST_BYTES = 64 << 20  # of tables and messages of refusals that are kept in memory
KEY_BYTES = 256  # what a key is counted as

SECONDS = prometheus_client.Summary(
    "dllm:grammar_compile_seconds", "Time to compile, or refuse, a grammar that is not in memory."
)

Kind = Literal["json", "regex", "grammar", "lark", "structural_tag"]


@dataclass(frozen=True)
class Spec:
    """A grammar as a request gives it.

    Attributes:
        text: a JSON schema, a regular expression, a grammar in EBNF or Lark's form, or a structural
            tag in JSON.
        any_whitespace: JSON may have any spaces and line ends between its parts.
        separators: JSON's, behind which there is no space; None for xgrammar's own.
    """

    kind: Kind
    text: str
    any_whitespace: bool = True
    separators: tuple[str, str] | None = None


def check_length(text: str) -> None:
    """Raise Unsupported for a text that is too long to be read at all."""
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise Unsupported("The grammar has half of a surrogate pair. Leave it out.") from None
    if length > MOST_TEXT:
        raise Unsupported(
            f"The grammar has {length:,} bytes; allowed: {MOST_TEXT:,}. Make it shorter."
        )


class Tokens(NamedTuple):
    """What tokens stand for.

    Attributes:
        words: the bytes of every token id, also of special tokens; empty for one in no text.
        names: of the special tokens.
        marks: names of other tokens that a tokenizer finds in a text before it looks for words.
    """

    words: list[bytes]
    names: Mapping[int, str]
    marks: Mapping[int, str] = MappingProxyType({})


def tokens_of(tokenizer: Any, vocab_size: int) -> Tokens:
    """The tokens of a tokenizer; takes 1 s for 262,144."""
    import xgrammar  # here: it imports PyTorch

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    added = tokenizer.added_tokens_decoder.items()
    names = {token: str(entry) for token, entry in added if entry.special}
    of_ids = tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    names |= dict(zip(tokenizer.all_special_ids, of_ids, strict=True))
    marks = {token: str(entry) for token, entry in added if not entry.special}
    # Others are lengths of white space, and letters.
    marks = {token: name for token, name in marks.items() if len(name.split()) == 1 < len(name)}
    return Tokens(list(info.decoded_vocab), names, marks)


class Grammars:
    """Makes the tables of one tokenizer; for any number of threads.

    Args:
        read_tokens: called once, in the thread that makes the first table.
        children: that compile; by default those that all tables of these tokens share.
    """

    def __init__(
        self,
        read_tokens: Callable[[], Tokens],
        children: Children | None = None,
        most_states: int = MOST_STATES,
    ) -> None:
        self.most_states = most_states
        self._read_tokens = read_tokens
        self._children = children
        self._reading = threading.Lock()
        self._tokens: Tokens | None = None
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="grammar")
        self._lock = threading.Lock()  # of the two below
        self._begun: dict[str, Future[bytes]] = {}  # that run or wait
        # What was asked for last: tables, and messages of refusals.
        self._recent: LRUCache[str, bytes | str] = LRUCache(
            MOST_BYTES, getsizeof=lambda found: len(found) + KEY_BYTES
        )

    def begin(self, spec: Spec, stops: Collection[int]) -> Future[bytes]:
        """The table (``Table.to_bytes``) of a grammar whose texts do not have the tokens ``stops``.

        A thread makes it; equal requests share what it makes. What is in memory is there at once.

        Raises (some at once, some from the future):
            Unsupported: the grammar is refused; the message names the limit, and what to do.
            TooSlow: it took too long, or too many others wait.
            ChildProcessError: two processes failed with it.
        """
        asked = json.dumps([asdict(spec), sorted(stops)])
        key = hashlib.sha256(asked.encode()).hexdigest()
        with self._lock:
            found = self._recent.get(key)
            if found is None:
                if key not in self._begun:
                    if len(self._begun) >= MOST_AT_ONCE + MOST_WAITING:
                        message = f"{MOST_WAITING} other grammars wait to be compiled."
                        raise TooSlow(f"{message} Send the request later.")
                    self._begun[key] = self._threads.submit(self._make, key, spec, stops)
                return self._begun[key]
        if isinstance(found, str):
            raise Unsupported(found)
        future = Future[bytes]()
        future.set_result(found)
        return future

    def _make(self, key: str, spec: Spec, stops: Collection[int]) -> bytes:
        found: bytes | str | None = None
        start = time.monotonic()
        try:
            check_length(spec.text)
            found = self._compile(spec, stops)
        except TooSlow:  # not remembered: the machine may be less busy
            raise
        except Unsupported as refusal:
            found = str(refusal)
            raise
        finally:
            SECONDS.observe(time.monotonic() - start)
            with self._lock:
                if found is not None:
                    with contextlib.suppress(ValueError):  # larger than all that is kept
                        self._recent[key] = found
                del self._begun[key]
        return found

    def _compile(self, spec: Spec, stops: Collection[int]) -> bytes:
        with self._reading:
            tokens = self._tokens = self._tokens or self._read_tokens()
            children = self._children = self._children or _children_of(tuple(tokens.words))
        is_tag = spec.kind == "structural_tag"
        said = "\n".join(spoken(read_json(spec.text))) if is_tag else ""
        unnamed = {token for token, name in tokens.names.items() if name not in said}
        # A tokenizer may have more tokens than the model.
        absent = {token for token in unnamed | {*stops} if token < len(tokens.words)}
        named = {token for token, name in tokens.marks.items() if name in said}
        marks = {token for token in named.union(tokens.names) - absent if token < len(tokens.words)}
        limits = {"absent": sorted(absent), "marks": sorted(marks)}
        return children.table(asdict(spec) | limits | {"most_states": self.most_states})


@functools.cache
def _children_of(words: tuple[bytes, ...]) -> Children:
    """One process of 200 MB, which forks others, for all engines with this vocabulary."""
    return Children(Vocabulary(words))
