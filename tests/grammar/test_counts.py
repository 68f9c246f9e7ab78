"""Strings of many characters: what is counted behind tokens is what JSON Schema counts."""

import json
import random

import jsonschema
import pytest

from dllm.grammar.counts import COUNTED, nearest_counted
from dllm.grammar.lowering import lower
from dllm.grammar.table import MOST_STATES, Table, by_tokens
from dllm.grammar.vocabulary import Vocabulary
from tests.support.grammars import of_schema

BYTES = [bytes([byte]) for byte in range(256)]
PIECES = ('","', '"a":"', 'xy"}', "abcdefgh", "a" * 20, "é", "日本", "\\n", 'x\\"yz', '","bcd')
VOCABULARY = Vocabulary([*BYTES, *(piece.encode() for piece in PIECES), b"ab\xc3"])
CHARACTERS = ("a", "b", "abc", "x", "é", "日", '"', "\n", "\U0001f600", ",")


def table_of(schema, most_states: int = MOST_STATES) -> Table:
    made, _ = of_schema(json.dumps(lower(schema).schema()))
    return by_tokens(nearest_counted(made, most_states), VOCABULARY, most_states=most_states)


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(CHARACTERS) for _ in range(length))[:length]


def accepts(table: Table, value, rng: random.Random | None) -> bool:
    """Whether a value is accepted, in the longest tokens that spell it, or in drawn ones."""
    spelled = json.dumps(value, ensure_ascii=False, separators=(", ", ": ")).encode()
    tokens, at = [], 0
    while at < len(spelled):
        ways = [w for w in VOCABULARY.words if spelled.startswith(w, at)]
        way = max(ways, key=len) if rng is None else rng.choice(ways)
        tokens.append(VOCABULARY.words.index(way))
        at += len(VOCABULARY.words[tokens[-1]])
    state = table.read(0, tokens)
    return state >= 0 and bool(table.accepts[state])


def strings(fewest: int, most: int, rng: random.Random) -> list[str]:
    near = (0, 1, fewest - 1, fewest, most // 2, most - 1, most, most + 1, most + 2)
    return [text(rng, length) for length in near for _ in range(3) if length >= 0]


@pytest.mark.parametrize(("fewest", "most"), [(0, 40), (3, 60), (0, 300)])
def test_lengths_are_exact_where_they_fit(fewest, most):
    rng = random.Random(0)
    one = {"type": "string", "minLength": fewest, "maxLength": most}
    many = {"type": "array", "items": {"type": "string", "maxLength": 20}}
    schema = {"type": "object", "properties": {"a": one, "b": many}, "required": ["a", "b"]}
    table = table_of(schema | {"additionalProperties": False})
    for string in strings(fewest, most, rng):
        items = [text(rng, rng.choice([0, 3, 19, 20, 21])) for _ in range(rng.randrange(3))]
        value = {"a": string, "b": items}
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert accepts(table, value, rng) == is_valid, value


def test_what_does_not_fit_is_rounded_up():
    rng = random.Random(1)
    names = [f"name{number}" for number in range(12)]
    schema = {"type": "array", "prefixItems": [{"type": "string", "maxLength": 300}] * 12}
    schema |= {"minItems": 12, "items": False}
    table = table_of(schema)
    assert len(table.accepts) <= COUNTED
    assert accepts(table, names, rng)
    for string in strings(0, 300, rng):
        assert len(string) <= 300 or not accepts(table, [*names[:-1], string], rng)
    assert accepts(table, [*names[:-1], "abcdefgh" * 20], None)


def test_circles_with_a_common_state_have_the_smallest_limit():
    rng = random.Random(3)
    schema = {"anyOf": [{"type": "string", "maxLength": 40}, {"enum": ["abc", "a" * 30]}]}
    table = table_of(schema)
    for string in ["abc", "a" * 30, *strings(0, 40, rng)]:
        assert accepts(table, string, rng) == (len(string) <= 40), string


def test_a_repetition_of_a_pattern_is_counted():
    rng = random.Random(4)
    table = table_of({"type": "string", "pattern": "^(?:[a-z]{3,40}-[a-z]{0,20})$"})
    for left, right, is_valid in [(3, 0, True), (40, 20, True), (40, 21, False), (41, 0, False)]:
        assert accepts(table, "a" * left + "-" + "b" * right, rng) == is_valid
    assert not accepts(table, "ab-", rng)
