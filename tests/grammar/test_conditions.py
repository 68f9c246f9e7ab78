"""``not`` and ``if``: what is written is of the schema, and the other values are not.

``jsonschema`` says which values are of a schema.
"""

import json

import jsonschema
import pytest

from dllm.grammar.automaton import DEAD, START
from dllm.grammar.lowering import lower
from dllm.grammar.refusals import Unsupported
from tests.support.grammars import of_schema

MEMBERS = {"a": {"type": "string", "maxLength": 3}, "b": {"type": "integer"}}
MEMBERS |= {"t": {"enum": ["x", "y"]}}
OBJECT = {"type": "object", "properties": MEMBERS}
IS_X = {"properties": {"t": {"const": "x"}}}
BOTH = {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}
VALUES = (
    *(None, True, False, 0, 1, 4, 5, 8, 1.5, "", "a", "ab", "abc", "abcd", "ab\n", "x"),
    *([], [None], [None, None], {}, {"a": "q"}, {"b": 1}, {"a": "q", "b": 1}, {"t": "x"}),
    *({"t": "y"}, {"a": "q", "t": "x"}, {"b": 2, "t": "y"}, {"a": "s", "b": 2, "t": "y"}),
    *({"q": 1}, {"a": 1}, {"a": "abcd"}),
)


def accepted(schema) -> list[object]:
    made, _ = of_schema(json.dumps(lower(schema).schema()))
    ends = ((value, made.read(START, json.dumps(value).encode())) for value in VALUES)
    return [value for value, state in ends if state != DEAD and made.accepts(state)]


# What is valid and not written is behind each schema.
CASES = {
    "required": (OBJECT | {"not": {"required": ["a"]}}, [{"q": 1}]),
    "one of two": (OBJECT | {"not": BOTH, "additionalProperties": False}, []),
    "then and else": (
        OBJECT
        | {"required": ["t"], "if": IS_X, "then": {"required": ["a"]}}
        | {"else": {"required": ["b"]}},
        [],
    ),
    "then alone": (OBJECT | {"required": ["t"], "if": IS_X, "then": False}, []),
    "of numbers": ({"if": {"type": "integer"}, "then": {"maximum": 7}, "else": False}, []),
    "a type": ({"not": {"type": "number"}}, []),
    "types": ({"not": {"anyOf": [{"type": "object"}, {"type": "array"}]}}, []),
    "twice": ({"not": {"not": {"type": "boolean"}}}, []),
    "a text": ({"type": "string", "not": {"const": "abc"}}, []),
    "texts": ({"type": "string", "not": {"enum": ["abc", "ab\n", ""]}}, []),
    "a pattern": ({"type": "string", "not": {"pattern": "ab"}}, []),
    "values": ({"type": "boolean", "not": {"enum": [1, True]}}, []),
    "a bound": ({"type": "integer", "not": {"minimum": 5}}, []),
    "a length": ({"type": "string", "maxLength": 4, "not": {"minLength": 3}}, []),
    "items": ({"type": "array", "items": {"type": "null"}, "not": {"minItems": 2}}, []),
    "a property": (
        {"type": "object", "additionalProperties": False}
        | {"properties": MEMBERS, "not": {"properties": {"b": {"minimum": 2}}}},
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_told_apart(name):
    schema, unwritten = CASES[name]
    valid = [one for one in VALUES if jsonschema.Draft202012Validator(schema).is_valid(one)]
    found = accepted(schema)
    assert 0 < len(found) < len(VALUES)
    texts = [json.dumps(value) for value in found]
    assert texts == [json.dumps(one) for one in valid if one not in unwritten]


@pytest.mark.parametrize("beside", [{}, {"allOf": [{"not": {"required": ["b"]}}]}])
def test_members_of_what_does_not_hold_are_unevaluated(beside):
    condition = {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["a"]}}
    with pytest.raises(Unsupported, match="'unevaluatedProperties'"):
        lower(beside | condition | {"unevaluatedProperties": False})


@pytest.mark.parametrize("inner", [{"format": "date"}, {"uniqueItems": True}])
def test_what_has_no_complement_is_refused(inner):
    with pytest.raises(Unsupported, match="'not'"):
        lower({"not": inner})
