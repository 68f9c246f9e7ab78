"""What a lowered schema holds, narrows and refuses; the automaton says which texts it has."""

import json

import pytest

from dllm.grammar.counts import nearest_counted
from dllm.grammar.lowering import lower
from dllm.grammar.nodes import Text
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import MOST_STATES, by_tokens
from dllm.grammar.tags import lower_text
from tests.support.grammars import GRAMMARS, read
from tests.support.schema_judge import BYTES, accepts

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def object_of(*required, **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


def are_accepted(schema, texts) -> list[bool]:
    made = read("json", json.dumps(lower(schema).schema()))
    table = by_tokens(nearest_counted(made, MOST_STATES), BYTES)
    return [accepts(table, text) for text in texts]


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        # A keyword without a type speaks of its own type, beside all others.
        ({"minLength": 2}, ['"ab"', "1", "null"], ['"a"']),
        ({"minimum": 3}, ["3", '"x"'], ["2"]),
        # 0.1 means what it says, not the binary number next to it.
        ({"type": "number", "minimum": 0.1, "maximum": 0.1}, ["0.1"], ["0.2", "0.100001"]),
        ({"pattern": "^a+$"}, ['"aa"', "[]"], ['"b"']),
        # Values, as far as their neighbours allow them.
        ({"type": "string", "const": "5"}, ['"5"'], ["5"]),
        ({"type": "integer", "enum": [1, "a", 2]}, ["1", "2"], ['"a"']),
        ({"enum": ["ab", "c"], "pattern": "^a"}, ['"ab"'], ['"c"']),
        ({"const": {"not": 1, "if": 2}}, ['{"not": 1, "if": 2}'], ["1", "{}"]),
        (  # in any spacing
            {"enum": [[], {}, [1, {"a": [None, "é"]}], "x"]},
            ["[]", "{}", '[1, {"a": [null, "é"]}]', '"x"'],
            ["[1]", '[1, {"a": [null]}]', '{"a": 1}', "[[]]"],
        ),
        ({"anyOf": [{"const": 1}, {"const": True}]}, ["1", "true"], ["0"]),
        (  # 128 alternatives, of which few are different
            {"type": "string", "allOf": [{"anyOf": [{"pattern": "a"}, {"pattern": "b"}]}] * 7},
            ['"a"', '"b"', '"bxa"'],
            ['"x"', "1"],
        ),
        # Required names that are not declared.
        ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
        (object_of("b", a=TEXT), ['{"a": "", "b": 1}', '{"b": 1}'], ['{"a": ""}']),
        # References of every kind.
        (
            {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": WHOLE}},
            ["7"],
            ['"x"'],
        ),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", **WHOLE}}}, ["7"], ['"x"']),
        (
            {"$id": "http://x/root", "$ref": "a", "$defs": {"a": {"$id": "a", **WHOLE}}},
            ["7"],
            ['"x"'],
        ),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": WHOLE}}, ["3"], ["2"]),
        (
            {
                "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                "$ref": "#/$defs/n",
            },
            ["[[], [[]]]"],
            ["[1]"],
        ),
        # Conjunctions.
        ({"allOf": [{"minimum": 2}, {"type": "integer"}, {"maximum": 4}]}, ["3"], ["1", "5", '""']),
        (
            {"allOf": [object_of("a", a=TEXT), object_of("b", b=WHOLE)]},
            ['{"a": "", "b": 1}'],
            ['{"a": ""}', '{"b": 1}'],
        ),
        (
            object_of(a=TEXT, b=TEXT) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": ""}', '{"b": ""}', '{"a": "", "b": ""}'],
            ["{}"],
        ),
        # oneOf: other types, other tags, or a name that the other one needs.
        ({"oneOf": [TEXT, WHOLE]}, ['"x"', "1"], ["null"]),
        (
            object_of(a=TEXT, b=TEXT) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": ""}', '{"b": ""}'],
            ["{}", '{"a": "", "b": ""}'],
        ),
        (
            {"oneOf": [object_of(k={"const": 1}, a=TEXT), object_of(k={"const": 2}, a=WHOLE)]},
            ['{"k": 1, "a": ""}', '{"k": 2, "a": 1}'],
            ['{"a": 1}', '{"k": 1, "a": 1}'],
        ),
        (  # of the type that stands beside it
            {"type": "object"}
            | {
                "oneOf": [
                    {"properties": {"a": TEXT}, "required": ["a", "b"]},
                    {"properties": {"a": TEXT}, "additionalProperties": False},
                ]
            },
            ['{"a": "", "b": 1}', '{"a": ""}', "{}"],
            ['{"a": 1}', "1"],
        ),
        # Names.
        (
            object_of(a=WHOLE) | {"patternProperties": {"^[ab]": TEXT | {"maxLength": 2}}},
            ['{"b": ""}', '{"ab": "12"}', "{}"],
            ['{"a": 1}', '{"b": 1}', '{"ab": "123"}', '{"c": ""}', '{"\\u0061b": ""}'],
        ),
        (
            object_of(a=WHOLE) | {"additionalProperties": TEXT},
            ['{"a": 1, "b": ""}', '{"ab": ""}', '{"": ""}', '{"a\\"": ""}'],
            ['{"a": ""}', '{"b": 1}', '{"\\u0061": ""}'],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": WHOLE,
            },
            ['{"a": 1}', "{}"],
            ['{"c": 1}', '{"a": ""}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}},
            ['{"x1": null}', "{}"],
            ['{"y": 1}'],
        ),
        (
            object_of(ax=TEXT) | {"patternProperties": {"^a": TEXT, "b$": WHOLE}},
            ['{"ax": "", "ac": "", "b": 1}', '{"cb": 1}', "{}"],
            ['{"ab": 1}', '{"ab": ""}', '{"c": 1}', '{"a": 1}', '{"ax": 1}'],
        ),
        (
            {"type": "object", "patternProperties": {"^x": WHOLE}, "additionalProperties": TEXT},
            ['{"x": 1, "y": ""}', '{"": ""}'],
            ['{"x": ""}', '{"y": 1}'],
        ),
        (
            {"type": "object", "patternProperties": {"^a": TEXT, "^b|c$": WHOLE}},
            ['{"a": "", "b": 1, "xc": 2}'],
            ['{"ac": 1}', '{"ac": ""}', '{"b": ""}', '{"x": 1}'],
        ),
        (  # found anywhere
            {"type": "object", "patternProperties": {"^x-": WHOLE}, "additionalProperties": False},
            ['{"x-a": 1, "x-": 2}'],
            ['{"ax-": 1}', '{"x-a": ""}'],
        ),
        (
            {"type": "object", "patternProperties": {'^"q"$': WHOLE}},
            ['{"\\"q\\"": 1}'],
            ['{"q": 1}', '{"\\"q\\"": ""}'],
        ),
        (
            object_of(a=TEXT, b=TEXT) | {"dependentRequired": {"a": ["b"]}},
            ['{"b": ""}', '{"a": "", "b": ""}'],
            ['{"a": ""}'],
        ),
        (
            {"allOf": [object_of(a=TEXT)], "unevaluatedProperties": False, "type": "object"},
            ['{"a": ""}'],
            ['{"b": 1}'],
        ),
        # Numbers.
        ({"type": "integer", "multipleOf": 7}, ["14", "0", "-7"], ["15"]),
        ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 10}, ["5"], ["0", "7"]),
        ({"type": "integer", "multipleOf": 12, "minimum": 1}, ["12", "3072"], ["0", "13", "-12"]),
        ({"type": "integer", "multipleOf": 3, "maximum": 7}, ["6", "-759"], ["9", "7"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "1.5"]),
        # Strings of several patterns, of none, and of a length or a format as well.
        ({"allOf": [TEXT | {"pattern": "a"}, {"pattern": "b$"}]}, ['"ab"', '"xaxb"'], ['"ba"']),
        (
            TEXT | {"not": {"pattern": r"^[\s.]+$"}, "maxLength": 3},
            ['"a"', '""', '" a."'],
            ['" ."', r'"\n"', r'"\u0020"', '"abcd"'],
        ),
        (
            {"type": "string", "pattern": "^(?:ab|é|\n)+$", "minLength": 3, "maxLength": 4},
            ['"abab"', '"ééé"', '"ab\\né"'],
            ['"éé"', '"ababé"', '"aab"'],
        ),
        ({"type": "string", "pattern": "^a*b*$", "minLength": 2}, ['"aab"', '"bb"'], ['"a"', '""']),
        (
            {"type": "string", "pattern": "^wss?:", "format": "uri", "maxLength": 9},
            ['"ws://a.b"', '"wss://a/"'],
            ['"ws:"', '"http://a"', '"ws://a.b/c"'],
        ),
        # Draft 4 calls it id.
        (
            {"id": "http://x/a#", "$ref": "http://x/a#/definitions/b", "definitions": {"b": WHOLE}},
            ["7"],
            ['"x"'],
        ),
        # Strings: patterns have what JSON escapes.
        ({"type": "string", "pattern": '^"[a-z]{2}"$'}, [r'"\"nu\""'], ['""nu""']),
        ({"type": "string", "pattern": r"^[A-Z]:\\[a-z]$"}, [r'"X:\\o"'], [r'"X:\o"']),
        ({"type": "string", "pattern": "^a\nb$"}, [r'"a\nb"'], ['"a\nb"']),
        ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 2}, ['"ab"'], ['"abc"', '""']),
        ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2024-02-31"']),
        ({"type": "string", "format": "uuid", "minLength": 3}, [], ['"x"']),
        (
            {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
            ['"https://a.bc"', '"http://www.abc.de/a/b-c.html"'],
            ['""', '"a b"', '"https://a"', f'"https://a.bc/{"a" * 2083}"'],
        ),
        (
            {"type": "string", "format": "uri"},
            ['"mailto:a@b.c"', '"https://a.b:80/c/?d=e#f"', '"urn:a:b"'],
            ['"a"', '"//a"', '"a:b c"', '"https://"'],
        ),
        (
            {"type": "string", "format": "uri-reference", "maxLength": 7},
            ['""', '"/"', '"a/b?c"', '"#a"', '"a:b"'],
            ['"//a"', '"a b"', '"a/b/c/d/e"'],
        ),
        ({"format": "duration"}, ['"P1Y2M"', '"PT5M"', '"P3W"', "1"], ['"P"', '"PT"', '"P1S"']),
        (
            {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^b+$"}]}},
            ['{"a": 1, "bb": 2}'],
            ['{"ab": 1}', '{"": 1}'],
        ),
        ({"type": "string", "format": "path"}, ['"/tmp/a b.txt"', '"é"'], ['""', r'"a\nb"']),
        ({"format": "file-path", "maxLength": 3}, ['"a/b"', "1"], ['"a/bc"']),
        (
            {"type": "string", "format": "uuid4"},
            ['"01234567-89ab-4def-8123-456789abcdef"'],
            ['"01234567-89ab-1def-8123-456789abcdef"'],
        ),
        (
            {"type": "string", "pattern": "^[a-z_][a-z0-9_]*$", "maxLength": 3},
            ['"a_1"'],
            ['"a_12"'],
        ),
        ({"type": "string", "pattern": "^a*$", "minLength": 2.0}, ['"aa"'], ['"a"']),
        ({"format": "ipv6"}, ['"::1"', '"1:2::8"', "1"], ['"::5.51.67.05"', '":1"']),
        ({"type": "string", "format": "binary"}, ['"any"'], ["1"]),
        ({"format": "iri"}, ['"http://a.org/b"', "1"], ['"b"']),
        (
            {"type": "string", "format": "regex"},
            [r'"^(a|b+)?[A-Z_]*\\.\\d$"', '""', '"x.*"'],
            ['"("', '"a**"', '"[z-a]"', '"+"', r'"\\"'],
        ),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5"], ["1"]),
        (
            {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": WHOLE},
            ['{"ab": 1}', "{}"],
            ['{"a": 1}'],
        ),
        # A relative base of a base.
        (
            {
                "$id": "http://h/a/",
                "$defs": {
                    "i": {"$id": "b/", **object_of("z", z={"$ref": "../x"})},
                    "x": {"$id": "x", **WHOLE},
                    "y": {"$id": "b/x", **TEXT},
                },
                "$ref": "b/",
            },
            ['{"z": 1}'],
            ['{"z": ""}'],
        ),
        # A definition without values beside one that refers to it.
        (
            object_of(w={"$ref": "#/$defs/y"}, z={"$ref": "#/$defs/x0"})
            | {
                "$defs": {
                    "x0": object_of(y={"$ref": "#/$defs/y"}),
                    "x": {"allOf": [{"$ref": "#/$defs/x0"}, object_of("no", no=False)]},
                    "y": object_of(x={"$ref": "#/$defs/x"}),
                }
            },
            ['{"w": {}, "z": {"y": {}}}'],
            ['{"w": {"x": {}}}'],
        ),
        # oneOf: what one of them has and the other one breaks.
        (
            {"oneOf": [{"type": "object", "minProperties": 1}, object_of(a=False)]},
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "patternProperties": {"^[a-z]+$": TEXT}},
                    object_of(a=TEXT, b=WHOLE),
                ]
            },
            ['{"b": 1}', '{"a": "", "b": 1}'],
            ["{}", '{"a": ""}', '{"b": null}'],
        ),
        # oneOf: lists that have nothing but the empty one in common.
        (
            {"oneOf": [{"type": "array", "items": TEXT}, {"type": "array", "items": WHOLE}]},
            ['["a", "b"]', "[1]"],
            ["[]", '["a", 1]'],
        ),
        # oneOf: texts without a common one.
        (
            {
                "oneOf": [
                    TEXT | {"pattern": "^[ab]{2}$"},
                    TEXT | {"pattern": "^-+$", "maxLength": 9},
                ]
            },
            ['"ab"', '"--"'],
            ['"c"', '"a-"'],
        ),
        (
            {"oneOf": [object_of("i", i=TEXT | {"pattern": f"^{x}/.+@"}) for x in ("a", "[bc]")]},
            ['{"i": "a/x@"}', '{"i": "c/x@"}'],
            ['{"i": "d/x@"}', "{}"],
        ),
        # oneOf: the values of one are of another one, too.
        (
            {"oneOf": [object_of("a", a=TEXT), {"properties": {"a": TEXT}}, {"type": "null"}]},
            ["{}"],
            ['{"a": "x"}', "null"],
        ),
        # A property that no text can be is not written.
        (object_of(a=TEXT | {"pattern": "^b", "not": {"pattern": "^b"}}), ["{}"], ['{"a": "b"}']),
        # Names: of propertyNames, and of one pattern or of none.
        (
            {"type": "object", "propertyNames": {"anyOf": [{"maxLength": 1}, {"pattern": "^ab"}]}}
            | {"patternProperties": {"^a": TEXT}, "additionalProperties": WHOLE},
            ['{"a": "x", "b": 1}', '{"abc": "x"}', "{}"],
            ['{"ac": "x"}', '{"b": "x"}', '{"bb": 1}', '{"a": 1}'],
        ),
        (
            object_of(a=TEXT)
            | {"propertyNames": {"pattern": "^[ab]+$"}}
            | {"additionalProperties": WHOLE},
            ['{"a": "x", "ab": 1}', '{"b": 1}'],
            ['{"a": 1}', '{"c": 1}'],
        ),
        # Bounds beyond 64 bits: integers of 64 bits.
        (
            {"type": "integer", "minimum": 0, "maximum": 9223372036854776000},
            ["0", "9223372036854775807"],
            ["-1", "9223372036854776001"],
        ),
        # oneOf in oneOf: apart from all that the inner one allows.
        (
            {
                "oneOf": [
                    object_of("m", m=WHOLE, k={"const": 3}),
                    {"oneOf": [object_of(k={"const": 1}), object_of("n", k={"const": 2}, n={})]},
                ]
            },
            ['{"m": 1, "k": 3}', '{"k": 1}', '{"k": 2, "n": 1}'],
            ["{}", '{"m": 1}', '{"n": 1}'],
        ),
        # Items.
        ({"prefixItems": [TEXT, WHOLE], "items": False}, ['["", 1]'], ['[1, ""]', '["", 1, 2]']),
        ({"items": [TEXT], "additionalItems": WHOLE}, ['["", 1, 2]'], ['["", ""]']),
        ({"contains": TEXT, "minContains": 0}, ["[1]", "[]"], []),
        ({"uniqueItems": True, "maxItems": 1, "type": "array"}, ["[1]", "[]"], ["[1, 2]"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_what_is_asked_is_held(schema, accepted, rejected):
    assert all(are_accepted(schema, accepted))
    assert not any(are_accepted(schema, rejected))


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"if": {"format": "date"}, "then": False}, "if", "#"),
        (object_of(a={"items": {"not": {"format": "date"}}}), "not", "#/properties/a/items"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": TEXT}}}, "contains", "#/$defs/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "#"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf", "#"),
        ({"multipleOf": 3, "minimum": 1, "maximum": 9999, "type": "integer"}, "multipleOf", "#"),
        ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf", "#/oneOf/1"),
        (
            object_of(p={"type": "string", "format": "uri", "maxLength": 9}),
            "format",
            "#/properties/p",
        ),
        (object_of(p={"type": "string", "format": "idn-email"}), "format", "#/properties/p"),
        ({"$ref": "http://elsewhere/schema"}, "$ref", "#"),
        ({"allOf": [{"$ref": "#"}]}, "$ref", "#"),
        (
            {"patternProperties": {"^a": TEXT}, "allOf": [{"additionalProperties": WHOLE}]}
            | {"type": "object"},
            "patternProperties",
            "#",
        ),
        ({"type": "object", "minProperties": 3}, "minProperties", "#"),
        (
            {"oneOf": [TEXT | {"format": "date"}, TEXT | {"format": "email"}]},
            "oneOf",
            "#/oneOf/0",
        ),
        (
            {
                "oneOf": [
                    object_of("k", k={"const": 1}, p={"not": {"format": "date"}}),
                    object_of("k", k={"const": 2}),
                ]
            },
            "not",
            "#/oneOf/0/properties/p",
        ),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "minimum", "#"),
        ({"const": 12345678901234567890123}, "enum", "#"),
        ({"enum": ["\ud800"]}, "enum", "#"),
        ({"type": "integer", "minimum": 1 << 70}, "minimum", "#"),
        ({"type": "object", "required": "abc"}, "required", "#"),
        ({"type": "string", "pattern": "a{5}", "minLength": 7}, "pattern", "#"),
        ({"type": "text"}, "type", "#"),
        (object_of(a={"type": None}), "type", "#/properties/a"),
        ({"type": ["string", None]}, "type", "#"),
        ({"type": []}, "type", "#"),
        ({"minimum": "3"}, "minimum", "#"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_held_is_refused_by_keyword_and_path(schema, keyword, path):
    with pytest.raises(Unsupported) as refusal:
        lower(schema)
    assert f"{keyword!r} at '{path}'" in str(refusal.value)
    tag = {"format": {"type": "tag", "content": {"type": "json_schema", "json_schema": schema}}}
    with pytest.raises(Unsupported):
        lower_text("structural_tag", json.dumps(tag))


def test_refusals_say_what_is_allowed_or_what_to_do():
    with pytest.raises(Unsupported, match=r"null is no type; allowed: object, array.*Leave"):
        lower({"type": None})
    with pytest.raises(Unsupported, match="send a list"):
        lower({"type": "array", "uniqueItems": True})


def test_a_definition_is_lowered_once():
    names = {"$ref": "#/$defs/names"}
    defs = {"names": {"items": TEXT, "type": "array"}}
    found = lower(object_of(a=names, b=names, c=names | {"title": "a note"}) | {"$defs": defs})
    assert len({*found.root.properties.values()}) == len(found.definitions) == 1


def test_so_is_a_definition_that_allows_nothing():
    """Each is named twice by the one in front: lowered at each reference, they would never end."""
    defs = {"48": {"not": {}}}
    for step in range(48):
        behind = {"$ref": f"#/$defs/{step + 1}"}
        defs[str(step)] = object_of(a=behind, b=behind) | {"minProperties": 1}
    found = lower(object_of(x={"$ref": "#/$defs/0"}) | {"$defs": defs})
    assert not found.definitions


def test_a_format_that_nobody_knows_limits_nothing():
    assert lower({"type": "string", "format": "iban"}).root == Text()


@pytest.mark.parametrize(
    "schema",
    [
        json.loads(GRAMMARS["person"][1]),
        True,
        {},
        {"anyOf": [TEXT, {"type": "null"}], "default": {"not": {}}, "title": "Note"},
        {"type": "object", "default": {"uniqueItems": True}, "properties": {"multipleOf": WHOLE}},
        {"properties": {"if": TEXT, "not": TEXT, "enum": TEXT, "anyOf": TEXT}},
        {"type": "integer", "format": "int64", "contains": {}},
    ],
    ids=str,
)
def test_notes_and_names_are_not_refused(schema):
    assert are_accepted(schema, ["nothing"]) == [False]


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"allOf": [TEXT, WHOLE]},
        object_of("a", a=False),
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "string", "pattern": "^a{5}$", "minLength": 7},
        {"type": "number", "minimum": 5, "exclusiveMaximum": 5},
        {"type": "number", "minimum": 5, "exclusiveMinimum": 5, "maximum": 5},
    ],
    ids=str,
)
def test_a_schema_without_values_is_refused(schema):
    with pytest.raises(Unsupported, match="No value"):
        lower(schema)


@pytest.mark.parametrize(
    "schema", [[], 3, {"properties": 3}, {"required": 5}, {"anyOf": {}}, {"items": 1}]
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(Unsupported):
        lower(schema)


def test_damaged_json_is_refused():
    with pytest.raises(Unsupported, match="no valid JSON"):
        lower_text("json", "{")
