"""The table of a grammar: from memory, from a file, or built, within limits of size and time.

A grammar is refused if its text is too long, if it takes a child process (`children`) too much time
or memory to find its states, if they are too many, or if the tokens do too many different things.
"""

import hashlib
import importlib.metadata
import json
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dllm.grammar.automaton import TooSlow, Unsupported
from dllm.grammar.cache import Files, Recent
from dllm.grammar.children import Children
from dllm.grammar.table import MOST_STATES, Table, by_tokens, time_limit
from dllm.grammar.vocabulary import Vocabulary

MOST_TEXT = 1 << 17  # bytes of a schema, regular expression or grammar
TOKEN_SECONDS = 5.0  # from bytes to tokens
MOST_TABLE_BYTES = 256 << 20  # of all tables in memory
MOST_REFUSALS = 1024  # remembered

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


def check_length(spec: Spec) -> None:
    """Raise Unsupported for a text that xgrammar must not even be asked to read."""
    length = len(spec.text.encode(errors="surrogatepass"))
    if length > MOST_TEXT:
        raise Unsupported(
            f"The grammar has {length:,} bytes; allowed: {MOST_TEXT:,}. Make it shorter."
        )


class Compiler:
    """Makes the tables of one vocabulary; for any number of threads.

    Args:
        folder: for files of tables; None for no files.
        children: that compile; new ones by default.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        folder: Path | None = None,
        children: Children | None = None,
        most_states: int = MOST_STATES,
        most_bytes: int = MOST_TABLE_BYTES,
    ) -> None:
        self.vocabulary = vocabulary
        self.most_states = most_states
        self._children = children or Children()
        self._files = Files(folder) if folder else None
        self._recent = Recent(most_bytes)
        self._refusals: dict[str, str] = {}
        self._running: dict[str, Future[Table]] = {}
        self._lock = threading.Lock()
        versions = importlib.metadata.version("xgrammar"), _own_digest()
        self._made_with = [*versions, vocabulary.digest, most_states]

    def table(self, spec: Spec) -> Table:
        """The table of a grammar; equal requests at one time build it once.

        Raises:
            Unsupported: the grammar is refused; the message names the limit, and what to do.
        """
        check_length(spec)
        given = json.dumps([*self._made_with, asdict(spec)])
        key = hashlib.sha256(given.encode()).hexdigest()
        if table := self._recent.get(key):
            return table
        with self._lock:
            if key in self._refusals:
                raise Unsupported(self._refusals[key])
            running = self._running.get(key)
            if is_mine := running is None:
                running = self._running[key] = Future()
        if is_mine:
            try:
                table = self._find(key, spec)
                self._recent.put(key, table)
                running.set_result(table)
            except BaseException as error:
                self._remember(key, error)
                running.set_exception(error)
            finally:
                with self._lock:
                    del self._running[key]
        return running.result()

    def _remember(self, key: str, error: BaseException) -> None:
        """A refusal, unless it is one of a busy machine."""
        if isinstance(error, Unsupported) and not isinstance(error, TooSlow):
            with self._lock:
                if len(self._refusals) >= MOST_REFUSALS:
                    self._refusals.clear()
                self._refusals[key] = str(error)

    def _find(self, key: str, spec: Spec) -> Table:
        vocab_size = len(self.vocabulary.words)
        if self._files and (table := self._files.get(key, vocab_size)):
            return table
        request = asdict(spec) | {"most_states": self.most_states}
        states = self._children.explore(request)
        table = by_tokens(states, self.vocabulary, time_limit(TOKEN_SECONDS))
        if self._files:
            self._files.put(key, table)
        return table


@cache
def _own_digest() -> str:
    """Of this package's source: a table that another version of it has made is not used."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
