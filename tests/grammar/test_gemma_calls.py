"""Tool calls in Gemma's syntax: every text is a call that vLLM reads and the schema allows."""

import json

import jsonschema
import numpy as np
import pytest
from vllm.parser.gemma4 import _parse_gemma4_args

from dllm.grammar.children import Children
from dllm.grammar.compile import Grammars, Spec, Tokens
from dllm.grammar.gemma_arguments import QUOTE
from dllm.grammar.gemma_calls import BEGIN, END, structural_tag
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import Table
from tests.support.grammars import VOCABULARY, WORDS, accepts, spelled
from tests.support.patience import HANG_S
from tests.support.tool_schemas import random_text

DAY = {"type": "string", "enum": ["Monday", "Friday"]}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "day": DAY},
        "required": ["city"],
    },
    "all required": {
        "type": "object",
        "properties": {"b": {"type": "boolean"}, "a": {"type": "number"}},
        "required": ["a", "b"],
    },
    "lists": {
        "type": "object",
        "properties": {
            "some": {"type": "array", "items": DAY, "minItems": 1, "maxItems": 3},
            "any": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["some", "any"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "who": {"$ref": "#/$defs/person"},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        },
        "required": ["who"],
        "$defs": {
            "person": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]+$"}},
                "required": ["name"],
            }
        },
    },
    "ranges": {
        "type": "object",
        "properties": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "level": {"enum": [1, 2.5, True, None, "high"]},
        },
        "required": ["hour", "level"],
    },
    "nothing": {"type": "object", "additionalProperties": False},
    "listed": {"type": "object", "enum": [{"a": 1}, {"a": True, "b": [{}]}]},
}
FREE = ({"type": "object"}, True, {}, {"type": "object", "additionalProperties": {"type": "null"}})


@pytest.fixture(scope="module")
def compiler():
    children = Children(VOCABULARY, seconds=HANG_S)
    yield Grammars(lambda: Tokens(list(WORDS), {}), children=children)
    children.close()


def table_of(compiler, schema, choice: str) -> Table:
    nothing = {"type": "object", "additionalProperties": False}
    tag = structural_tag([("ask", schema), ("other", nothing)], choice)
    spec = Spec("structural_tag", json.dumps(tag.model_dump()))
    return Table.from_bytes(compiler.begin(spec, []).result())


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_a_call_that_the_schema_allows(compiler, name):
    """How vLLM reads them is tested with its own parser (``tests/patches/test_tool_calls.py``)."""
    schema, draws = SCHEMAS[name], np.random.default_rng(0)
    found = table_of(compiler, schema, "forced")
    for _ in range(15):
        text = random_text(found, draws, 120)
        if text.startswith(f"{BEGIN}call:other"):
            assert text == f"{BEGIN}call:other{{}}{END}"
            continue
        inside = text.removeprefix(f"{BEGIN}call:ask{{").removesuffix(f"}}{END}")
        assert text == f"{BEGIN}call:ask{{{inside}}}{END}"
        arguments = as_json(inside)
        jsonschema.validate(arguments, schema)
        assert list(arguments) == sorted(arguments)
        assert set(_parse_gemma4_args(inside)) == set(arguments), "vLLM reads other keys"


def as_json(inside: str):
    """The arguments, read independently of vLLM: quotes become JSON's, keys get theirs."""
    parts = inside.split(QUOTE)
    for place in range(0, len(parts), 2):
        for key in ("city", "days", "day", "some", "any", "who", "note", "name", "hour", "level"):
            parts[place] = parts[place].replace(f"{key}:", f'"{key}":')
        for key in ("a", "b"):
            if parts[place].startswith(f"{key}:") or f",{key}:" in parts[place]:
                parts[place] = parts[place].replace(f"{key}:", f'"{key}":')
    for place in range(1, len(parts), 2):
        parts[place] = json.dumps(parts[place])
    return json.loads("{" + "".join(parts) + "}")


@pytest.mark.parametrize("schema", FREE, ids=str)
def test_an_object_that_declares_nothing_has_any_names(compiler, schema):
    draws = np.random.default_rng(1)
    found, read = table_of(compiler, schema, "forced"), []
    for _ in range(20):
        text = random_text(found, draws, 120)
        if inside := text.removeprefix(f"{BEGIN}call:ask{{").removesuffix(f"}}{END}"):
            read.append(_parse_gemma4_args(inside))
    assert any(read)


def test_a_string_ends_at_the_first_quote(compiler):
    found = table_of(compiler, {"properties": {"a": {"type": "string"}}}, "forced")
    begin = f"{BEGIN}call:ask{{a:{QUOTE}"
    for inside in ("a<b", "<<a", "a < b", "|>", "a<", "<title>", "<tool<tool_call"):
        assert accepts(found, f"{begin}{inside}{QUOTE}}}{END}")
    for inside in ("<<|", "<|", f"<{QUOTE}", END, f"<{END}", "<channel|>"):
        assert found.read(0, spelled(f"{begin}{inside}{QUOTE}}}{END}")) < 0


@pytest.mark.parametrize("pattern", [".*", r"[^\s]+", "^[ -~]*$"])
def test_no_pattern_reads_past_the_end_of_its_string(compiler, pattern):
    """Else an answer could have properties that the schema forbids."""
    schema = {
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = table_of(compiler, schema, "forced")
    call = f"{BEGIN}call:ask{{a:{QUOTE}%s{QUOTE}}}{END}"
    assert accepts(found, call % 'x|">,b:y')
    assert found.read(0, spelled(call % f"x{QUOTE},b:{QUOTE}y")) < 0


def test_arguments_behind_a_reference(compiler):
    schema = {"$ref": "#/$defs/ask", "$defs": {"ask": SCHEMAS["weather"]}}
    behind, plain = (table_of(compiler, one, "forced") for one in (schema, SCHEMAS["weather"]))
    assert (behind.next == plain.next).all()


def test_auto_allows_text_and_required_does_not(compiler):
    schema = SCHEMAS["weather"]
    free = table_of(compiler, schema, "auto")
    assert free.accepts[0] and free.read(0, [0, 1, 0]) >= 0
    required = table_of(compiler, schema, "required")
    assert not required.accepts[0] and required.read(0, [0]) < 0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a<b"}}}, "no text"),
        ({"properties": {"a:b": {}}}, "called 'a:b'"),
        ({"properties": {" a": {}}}, "called ' a'"),
        ({"properties": {"a": {"const": 'x<|"|>'}}}, "a mark of calls"),
        ({"properties": {"a": {"const": {"b}": 1}}}}, "called 'b}'"),
        ({"properties": {"a": {"type": "string"}}, "minProperties": 1}, "'minProperties'"),
        ({"patternProperties": {"^[a-z]+$": {}}}, "'patternProperties'"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "no object"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_held_to_is_refused(compiler, schema, message):
    with pytest.raises(Unsupported, match=f"The tool 'ask'.*{message}"):
        table_of(compiler, schema, "required")


def test_a_list_has_its_bounds(compiler):
    """Of the items in front, too, which need not all be there."""
    schema = {
        "properties": {
            "a": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
            "b": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
        },
        "required": ["a", "b"],
    }
    found = table_of(compiler, schema, "forced")

    def has(a: str, b: str) -> bool:
        return accepts(found, f"{BEGIN}call:ask{{a:[{a}],b:[{b}]}}{END}")

    lengths = [has(",".join(["null"] * count), "1,2") for count in range(5)]
    assert lengths == [False, False, True, True, False]
    assert has("null,null", "1,2") and not has("null,null", "2")
    assert not has("null,null", "1,2,1")


def test_references_may_lead_back_and_properties_may_be_many(compiler):
    """Of these, any are left out."""
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    properties = {f"p{number:03}": {"type": "null"} for number in range(100)}
    schema = {"properties": {**properties, "node": node}, "$defs": {"node": node}}
    found = table_of(compiler, schema, "forced")
    for inside in ("node:{next:{next:{}}}", "node:{},p003:null,p097:null", ""):
        assert accepts(found, f"{BEGIN}call:ask{{{inside}}}{END}")
    for inside in ("node:{node:{}}", "p097:null,p003:null", "p003:null,p003:null"):
        assert not accepts(found, f"{BEGIN}call:ask{{{inside}}}{END}")
