"""The table of a grammar: from memory, from a file, or compiled by a child process.

A grammar is refused if its text is too long, if it takes a child (`children`) too much time or
memory, if its states are too many, or if the tokens do too many different things.

A special token (``<eos>``, ``<|turn>``) is no text: a JSON string must not hold one, though its
name could be spelled there. Only the text of a structural tag may name special tokens, for instance
those around a tool call; where a tag does, the token may stand for its name.
"""

import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dllm.grammar.automaton import TooSlow, Unsupported
from dllm.grammar.cache import Files, Recent
from dllm.grammar.children import Children
from dllm.grammar.json_schema import check_text
from dllm.grammar.table import MOST_STATES
from dllm.grammar.vocabulary import Vocabulary

MOST_TEXT = 1 << 17  # bytes of a schema, regular expression or grammar

Kind = Literal["json", "regex", "grammar", "lark", "structural_tag"]
# Where a structural tag has texts, in either of xgrammar's forms.
SPOKEN = ("begin", "end", "triggers", "value", "separator", "pattern", "grammar")


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
    """Raise Unsupported for a text of a grammar that nothing must even be asked to read."""
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
    """

    words: list[bytes]
    names: dict[int, str]


class Grammars:
    """Makes the tables of one tokenizer; for any number of threads.

    Args:
        read_tokens: called once, in the thread that asks for the first table.
        folder: for files of tables; None for no files.
        children: that compile; new ones by default.
        most_states: of a table.
    """

    def __init__(
        self,
        read_tokens: Callable[[], Tokens],
        folder: Path | None = None,
        children: Children | None = None,
        most_states: int = MOST_STATES,
    ) -> None:
        self.most_states = most_states
        self._read_tokens = read_tokens
        self._files = Files(folder) if folder else None
        self._recent = Recent()
        self._reading = threading.Lock()
        self._children = children

    def known(self, spec: Spec, stops: Collection[int]) -> bytes | None:
        """What ``packed`` has returned for these arguments, if it is still kept; at once.

        Raises:
            Unsupported: it has refused them.
        """
        found = self._recent.get(_key(spec, stops))
        if isinstance(found, str):
            raise Unsupported(found)
        return found

    def packed(self, spec: Spec, stops: Collection[int]) -> bytes:
        """The table (``Table.to_bytes``) of a grammar, in whose texts the tokens ``stops`` are not.

        Raises:
            Unsupported: the grammar is refused; the message names the limit, and what to do.
            ChildProcessError: two processes failed with it.
        """
        if (found := self.known(spec, stops)) is not None:
            return found
        key = _key(spec, stops)
        try:
            check_length(spec.text)
            check_text(spec.kind, spec.text)
            found = self._find(spec, stops)
        except TooSlow:  # not remembered: the machine may be less busy
            raise
        except Unsupported as refusal:
            self._recent.put(key, str(refusal))
            raise
        self._recent.put(key, found)
        return found

    def _find(self, spec: Spec, stops: Collection[int]) -> bytes:
        with self._reading:
            tokens, made_with = self._tokens, self._made_with
            children = self._children = self._children or Children(Vocabulary(tokens.words))
        spoken = ""
        if spec.kind == "structural_tag":
            spoken = "\n".join(_spoken(json.loads(spec.text)))
        unnamed = (token for token, name in tokens.names.items() if name not in spoken)
        made_from = [*made_with, self.most_states, _key(spec, stops)]
        key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        if self._files and (table := self._files.get(key, len(tokens.words))):
            return table
        absent = sorted({*stops, *unnamed})
        given = {"most_states": self.most_states, "absent": absent}
        table = children.table(asdict(spec) | given)
        if self._files:
            self._files.put(key, table)
        return table

    @cached_property
    def _tokens(self) -> Tokens:
        return self._read_tokens()

    @cached_property
    def _made_with(self) -> list[str]:
        """What a table depends on, besides the request."""
        words, names = self._tokens
        digest = hashlib.sha256(Vocabulary(words).to_bytes() + json.dumps(names).encode())
        return [importlib.metadata.version("xgrammar"), _own_digest(), digest.hexdigest()]


def _spoken(tag: Any, key: str = "") -> Iterator[str]:
    """The texts that a structural tag has answers written with; no names or descriptions."""
    if isinstance(tag, str) and key in SPOKEN:
        yield tag
    elif isinstance(tag, list):
        for one in tag:
            yield from _spoken(one, key)
    elif isinstance(tag, Mapping):
        for name, value in tag.items():
            if name not in ("json_schema", "schema"):
                yield from _spoken(value, name)


def _key(spec: Spec, stops: Collection[int]) -> str:
    return hashlib.sha256(json.dumps([asdict(spec), sorted(stops)]).encode()).hexdigest()


@cache
def _own_digest() -> str:
    """Of this package's source: a table that another version of it has made is not used."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
