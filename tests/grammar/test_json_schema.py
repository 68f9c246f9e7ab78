"""What xgrammar would leave out of a schema is refused; what it holds answers to is not."""

import json

import pytest

from dllm.grammar.automaton import Unsupported
from dllm.grammar.json_schema import check_schema, check_text
from tests.support.grammars import GRAMMARS

PERSON = json.loads(GRAMMARS["person"][1])
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"not": TEXT}, "'not'"),
        ({"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]}, "'properties'.*'anyOf'"),
        ({"type": "string", "anyOf": [{"minLength": 3}]}, "'type'.*'anyOf'"),
        ({"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": TEXT}}, "'minLength'.*'\\$ref'"),
        ({"anyOf": [TEXT], "oneOf": [TEXT]}, "'oneOf'.*'anyOf'"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "'not'"),
        ({"$defs": {"a": {"else": {}}}, "$ref": "#/$defs/a"}, "'else'"),
        ({"type": "string", "pattern": "(?=a)"}, "looks around"),
        ({"properties": {"p": {"type": "string", "pattern": "a$b"}}}, "inside"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_left_out_is_refused(schema, named):
    with pytest.raises(Unsupported, match=named):
        check_schema(schema)
    tag = {"format": {"type": "tag", "content": {"type": "json_schema", "json_schema": schema}}}
    with pytest.raises(Unsupported, match=named):
        check_text("structural_tag", json.dumps(tag))


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        True,
        {},
        {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "Note"},
        {"$ref": "#/$defs/a", "$defs": {"a": TEXT}, "description": "an a"},
        {"type": "string", "enum": ["a"]},
        {"const": {"not": 1, "if": 2}},
        {"properties": {"if": TEXT, "not": TEXT, "enum": TEXT, "anyOf": TEXT}},
        {"type": "string", "pattern": r"^[^$^]+\$\^(?:a|b)$"},
    ],
    ids=str,
)
def test_what_is_held_to_is_not_refused(schema):
    check_schema(schema)
    check_text("json", json.dumps(schema))


def test_patterns_outside_of_strings_are_checked():
    with pytest.raises(Unsupported, match="looks around"):
        check_schema({"patternProperties": {"(?!a)b": TEXT}})
    with pytest.raises(Unsupported, match="looks around"):
        check_text("structural_tag", '{"format": {"type": "regex", "pattern": "(?!no)[a-z]{2}"}}')


def test_damaged_json_is_refused():
    with pytest.raises(Unsupported, match="no valid JSON"):
        check_text("json", "{")
