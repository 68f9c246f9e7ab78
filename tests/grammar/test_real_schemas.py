"""Schemas in the forms and sizes that people send: they are served, and held."""

import json
import string

import pytest

from dllm.grammar.counts import nearest_counted
from dllm.grammar.lowering import lower
from dllm.grammar.table import MOST_STATES, by_tokens
from tests.support.grammars import of_schema
from tests.support.schema_judge import BYTES, accepts

TEXT, WHOLE, ANY = {"type": "string"}, {"type": "integer"}, {"type": "object"}
LETTERS = string.ascii_lowercase


def closed(*required, **properties):
    shape = {"type": "object", "properties": properties, "required": list(required)}
    return shape | {"additionalProperties": False}


def tagged(tag, **properties):
    return closed("state", "builder", state={"const": tag}, builder=ANY, target=ANY, **properties)


def nested(depth, value):
    for _ in range(depth):
        value = {"a": value}
    return value


NODE = closed(
    "name",
    name=TEXT,
    kind={"enum": ["leaf", "tree"]},
    size=WHOLE,
    note={"type": ["string", "null"]},
    children={"type": "array", "items": {"$ref": "#/$defs/node"}},
)
CONTAINER = closed(
    "name", name=TEXT | {"maxLength": 63}, image=TEXT, args={"type": "array", "items": TEXT},
    env={"type": "object", "additionalProperties": TEXT}, ready={"type": "boolean"},
    port={"type": "integer", "minimum": 1, "maximum": 65535},
    memory=TEXT | {"pattern": "^[0-9]{1,6}(Ki|Mi|Gi)$"},
)  # fmt: skip
SETTING = closed(
    **{f"{letter * 9} {number}": TEXT for letter in LETTERS[:16] for number in range(6)},
    inner={"type": "object", "additionalProperties": {"$ref": "#/$defs/setting"}},
)
B_OR_C = {"anyOf": [{"required": ["a", "b"]}, {"required": ["a", "c"]}]}
NEEDED = {"a": {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, "d": B_OR_C, "e": B_OR_C}
IS_FILE = {"properties": {"kind": {"const": "file"}}}

# Of each: the schema, values that are accepted, values that are not.
CASES = {
    "a long text": (
        TEXT | {"minLength": 10, "maxLength": 1000},
        ["x" * 10, "x" * 1000],
        ["x" * 9, "x" * 1001],
    ),
    "two texts of 300": (
        closed("a", "b", a=TEXT | {"maxLength": 300}, b=TEXT | {"maxLength": 300}),
        [{"a": "x" * 300, "b": ""}, {"a": "é", "b": "x" * 300}],
        [{"a": "x" * 301, "b": ""}, {"a": ""}],
    ),
    "ten texts of 64": (
        closed(*LETTERS[:10], **{name: TEXT | {"maxLength": 64} for name in LETTERS[:10]}),
        [dict.fromkeys(LETTERS[:10], "x" * 64)],
        [dict.fromkeys(LETTERS[:10], "x" * 65), dict.fromkeys(LETTERS[:9], "")],
    ),
    "twenty addresses": (
        closed(**{name: TEXT | {"format": "email"} for name in LETTERS[:20]}),
        [{}, {"t": "a.b@c.de"}, {"a": "x@y.org", "t": "x@y.org"}],
        [{"a": "x"}, {"a": "@y.org"}],
    ),
    "sixty flags": (
        closed(**{f"is_{number}": {"type": "boolean"} for number in range(60)}),
        [{}, {"is_0": True, "is_59": False}],
        [{"is_60": True}, {"is_0": 1}],
    ),
    "texts or null": (
        closed(**{name: {"type": ["string", "null"]} for name in LETTERS[:15]}),
        [{"a": None, "o": "x"}, {}],
        [{"a": 1}, {"p": None}],
    ),
    "many values": (
        closed("unit", unit={"enum": [f"unit {number * 7919 % 1000}" for number in range(300)]}),
        [{"unit": "unit 0"}, {"unit": "unit 919"}],
        [{"unit": "unit 1"}, {"unit": "unit 10000"}],
    ),
    "any objects": (
        {"anyOf": [tagged("stopped"), tagged("running", total=WHOLE), tagged("error", error={})]},
        [
            {"state": "running", "builder": {"a": [1, None]}, "target": {}, "total": 1},
            {"state": "error", "builder": {}, "error": [1, {}]},
        ],
        [{"state": "stopped", "builder": {}, "total": 1}, {"state": "stopped", "builder": 1}],
    ),
    "any values in a list": (
        closed("jobs", jobs={"type": "array", "items": closed(perks={"type": "array"}, pay=ANY)}),
        [{"jobs": [{"perks": ["x", {"a": [1]}, None]}, {"pay": {"to": {"b": 2}}}]}],
        [{"jobs": [{"pay": 1}]}, {"jobs": {}}],
    ),
    "five levels": (ANY, [nested(5, 1), nested(4, [])], [1]),
    "a tree": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        [{"name": "a", "children": [{"name": "b", "note": None}, {"name": "c", "children": []}]}],
        [{"children": []}, {"name": "a", "children": [{"size": 1}]}],
    ),
    "settings in settings, of many names": (
        {"$defs": {"setting": SETTING}, "$ref": "#/$defs/setting"},
        [{"inner": {"x": {"aaaaaaaaa 1": "z"}, "w": {}}}],
        [{"inner": {"x": {"y": {}}}}, {"x": {}}],
    ),
    "a set of values": (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["read", "write", 1]}}
        | {"minItems": 1},
        [["write", "read"], [1, "read", "write"], ["read"]],
        [[], ["read", "read"], [1, "write", 1]],
    ),
    "a set of at most two truths": (
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 9},
        [[True, False], [False]],
        [[True, True], [True, False, True]],
    ),
    "dictionaries": (
        {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": WHOLE},
        },
        [{"a": {"b": 1, "c": 2}, "d": {}}],
        [{"a": 1}, {"a": {"b": "x"}}],
    ),
    "containers": (
        closed(
            "containers",
            containers={"type": "array", "items": CONTAINER, "minItems": 1},
            init={"type": "array", "items": CONTAINER},
            labels={"additionalProperties": TEXT},
        ),
        [{"containers": [{"name": "a", "env": {"A": "b"}, "port": 65535, "memory": "64Mi"}]}],
        [
            {"containers": []},
            {"containers": [{"name": "a", "port": 65536}]},
            {"containers": [{"name": "a", "memory": "64"}]},
        ],
    ),
    "names of a pattern beside declared ones": (
        {"properties": {"basic": TEXT}, "required": ["basic"], "patternProperties": {".*": TEXT}},
        [{"basic": "", "more": "x"}],
        [{"basic": "", "more": 1}, {"more": ""}],
    ),
    "a pattern and a length": (
        TEXT | {"pattern": r"^[\w.-]+(/[\w.-]+)*\.php$", "minLength": 8, "maxLength": 40},
        ["a/b/c.php", "a" * 36 + ".php"],
        ["a/b.php", "a" * 37 + ".php", "a//b/c.php", "aaaaaaaaa"],
    ),
    "an address of the web": (
        TEXT | {"allOf": [{"format": "uri"}, {"pattern": "^https?://"}]},
        ["https://a.org/b?c=d#e", "http://a"],
        ["ftp://a.org", "https://", "https://a b"],
    ),
    "formats that nobody knows": (
        closed(at=TEXT | {"format": "full-date"}, number=WHOLE | {"format": "int32"}),
        [{"at": "today", "number": 7}],
        [{"at": 7}],
    ),
    "one of two shapes": (
        {
            "type": "object",
            "oneOf": [
                {"properties": {"spider": TEXT, "args": {"type": "array"}}}
                | {"required": ["spider", "args"], "additionalProperties": False},
                {"properties": {"spider": TEXT}, "additionalProperties": False},
            ],
        },
        [{"spider": "a", "args": []}, {"spider": "a"}],
        [{"args": []}, {"spider": 1}],
    ),
    "draft 4": (
        {"id": "http://x/news#", "definitions": {"item": closed("of", of=TEXT)}}
        | closed(
            "items", items={"type": "array", "items": {"$ref": "http://x/news#/definitions/item"}}
        ),
        [{"items": [{"of": "x"}]}],
        [{"items": [{}]}],
    ),
    "names that need others": (
        {"type": "object", "properties": dict.fromkeys(LETTERS[:8], TEXT)}
        | {"dependencies": NEEDED | {"b": ["a"], "c": ["a"], "f": ["a", "c"], "g": ["a", "b"]}}
        | {"dependentRequired": {"h": ["b"]}},
        [dict.fromkeys("abcdefgh", ""), dict.fromkeys("acf", ""), dict.fromkeys("abegh", ""), {}],
        [{"a": ""}, dict.fromkeys("bc", ""), dict.fromkeys("abf", ""), dict.fromkeys("ach", "")],
    ),
    "by kind": (
        closed("kind", kind={"enum": ["file", "link"]}, path=TEXT, to=TEXT)
        | {"if": IS_FILE, "then": {"required": ["path"]}, "else": {"required": ["to"]}},
        [{"kind": "file", "path": "a"}, {"kind": "link", "to": "b"}],
        [{"kind": "file", "to": "b"}, {"kind": "link"}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_people_send_is_served_and_held(name):
    schema, accepted, rejected = CASES[name]
    made, _ = of_schema(json.dumps(lower(schema).schema()))
    table = by_tokens(nearest_counted(made, MOST_STATES), BYTES)
    for value in accepted:
        assert accepts(table, json.dumps(value, ensure_ascii=False)), value
    for value in rejected:
        assert not accepts(table, json.dumps(value, ensure_ascii=False)), value
