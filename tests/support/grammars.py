"""Grammars for tests, compiled by xgrammar, with a small vocabulary of odd tokens."""

import functools
import json
import random
from typing import Any

import numpy as np
import xgrammar

from dllm.grammar.automaton import DEAD, Automaton
from dllm.grammar.children import grammar_of
from dllm.grammar.patterns import HELD
from dllm.grammar.reach import nearest
from dllm.grammar.table import MOST_STATES, Table, by_tokens
from dllm.grammar.tags import lower_text
from dllm.grammar.vocabulary import Vocabulary

STOP, PADDING = 5, 6
WORDS = (
    *(b"a", b"b", b"ab", b"ba", b"aab", b"", b""),
    *(b'{"', b'":', b'": "', b'"}', b"true", b"null", b"12", b"0.5", b"name", b"red", b", "),
    *(bytes([byte]) for byte in range(256)),
    *("é".encode(), "日本".encode(), "日".encode()[:2]),
)
VOCABULARY = Vocabulary(WORDS)


@functools.cache
def compiler() -> xgrammar.GrammarCompiler:
    """xgrammar's compiler, for this vocabulary."""
    info = xgrammar.TokenizerInfo(
        list(WORDS),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(WORDS),
        stop_token_ids=[STOP],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1)


class Read(Automaton):
    """An automaton that reads texts."""

    def row(self, state: int) -> np.ndarray:
        """``[256]``: the state behind each byte, DEAD where it is not allowed."""
        self.targets(state)
        rows, part_of = self.rows([state], np.arange(-1, len(self)))
        return rows[0, part_of]

    def read(self, state: int, text: bytes) -> int:
        """The state behind a text, DEAD if it is not allowed."""
        for byte in text:
            if state == DEAD:
                return DEAD
            state = int(self.row(state)[byte])
        return state


def read(kind: str, text: str) -> Read:
    """Our automaton alone, without spaces in JSON."""
    text = lower_text(kind, text) if kind == "regex" and not HELD.fullmatch(text) else text
    return Read(grammar_of(kind, text, any_whitespace=False).serialize_json())


def automaton(kind: str, text: str) -> tuple[Read, Any]:
    """Our automaton, and xgrammar's compiled grammar."""
    if kind == "regex":
        grammar = xgrammar.Grammar.from_regex(text)
    else:
        grammar = grammar_of(kind, text, any_whitespace=False)
    return read(kind, text), compiler().compile_grammar(grammar)


def of_schema(text: str, any_whitespace: bool = False) -> tuple[Read, Any]:
    """As ``automaton``, of a JSON schema."""
    grammar = grammar_of("json", text, any_whitespace)
    return Read(grammar.serialize_json()), compiler().compile_grammar(grammar)


def build(
    made: Automaton, vocabulary: Vocabulary = VOCABULARY, most_states: int = MOST_STATES
) -> Table:
    return by_tokens(nearest(made, most_states), vocabulary)


def table(kind: str, text: str, **limits: Any) -> tuple[Table, Any]:
    """Our table, and xgrammar's compiled grammar."""
    made, compiled = automaton(kind, text)
    return build(made, **limits), compiled


def spelled(text: str) -> list[int]:
    """A text in tokens of a byte each."""
    return [WORDS.index(bytes([byte])) for byte in text.encode()]


def accepts(found: Table, text: str) -> bool:
    """Whether a text is a whole one of a table."""
    state = found.read(0, spelled(text))
    return state >= 0 and bool(found.accepts[state])


GRAMMARS = {
    "words": ("regex", "(ab)*"),
    "choice": ("ebnf", 'root ::= "yes" | "no" | "é"'),
    "optional": ("regex", "a*b?"),
    "counted": ("regex", "(aab|ba){1,3}"),
    "date": ("regex", "[0-9]{4}-[0-9]{2}"),
    "nested": ("ebnf", 'root ::= "(" root ")" | [0-9]+'),
    "list": ("ebnf", 'root ::= "[" (item ("," item)*)? "]"\nitem ::= [a-z]+ | root'),
    "anything": ("json", '{"type": "object"}'),
    "person": (
        "json",
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "red": {"enum": ["red", "blue", 1, None]},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        ),
    ),
    "short text": ("json", '{"type": "string", "minLength": 2, "maxLength": 4}'),
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema of up to three levels."""
    simple = ["string", "integer", "number", "boolean", "null"]
    simple += ["enum", "pattern", "range", "length"]
    kind = rng.choice(simple if depth == 2 else [*simple, "array", "object", "anyOf"])
    if kind == "enum":
        values = ["red", "blue", "x", "a b", 1, 2.5, None, True, "é"]
        return {"enum": rng.sample(values, rng.randint(1, 4))}
    if kind == "pattern":
        patterns = ["^[0-9]{4}-[0-9]{2}$", "^(ab)+$", "^[A-Z][a-z]*$"]
        return {"type": "string", "pattern": rng.choice(patterns)}
    if kind == "range":
        least = rng.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 99)}
    if kind == "length":
        least = rng.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}
    if kind == "array":
        least = rng.randint(0, 2)
        most = least + rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        keys = rng.sample(["a", "bb", "name", "long key", "n"], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {key: random_schema(rng, depth + 1) for key in keys},
            "required": [key for key in keys if rng.random() < 0.7],
            "additionalProperties": rng.random() < 0.2,
        }
    return {"type": kind}
