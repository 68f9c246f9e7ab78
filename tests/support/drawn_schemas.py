"""JSON schemas to draw, as ``hypothesis-jsonschema`` draws values of a schema of schemas."""

from typing import Any

from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

NAMES = ["a", "b", "name", "long key", 'q"', "é", "n-1"]
COUNT = {"type": "integer", "minimum": 0, "maximum": 4}
NUMBER = {"type": "number", "minimum": -1000, "maximum": 1000}
PATTERNS = [
    *("^[0-9]{3}$", "^(ab)+$", '"', "^[^,]+$", "a|b", r"^\w+\s?\d*$", "^[A-Z]:\\\\$", "x{2,4}"),
]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
VALUES = {"enum": ["red", 'a"b', "é", "x\ny", 0, 1.5, -3, True, None, [], {"a": 1}]}


def _options(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return closed | {"required": list(required)}


def _one(value: Any) -> dict[str, Any]:
    return {"const": value}


def _of_names(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "propertyNames": {"enum": NAMES},
        "additionalProperties": schema,
        "maxProperties": 3,
    }


def _list(schema: dict[str, Any], most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most}


def _schema_of_free_schemas(depth: int) -> dict[str, Any]:
    """Any keyword beside any other."""
    leaf = {
        "type": {"anyOf": [{"enum": TYPES}, _list({"enum": TYPES}) | {"uniqueItems": True}]},
        **{key: COUNT for key in ("minLength", "maxLength", "minItems", "maxItems")},
        **{key: COUNT for key in ("minProperties", "maxProperties")},
        **{key: NUMBER for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
        "multipleOf": {"enum": [1, 2, 5, 0.5]},
        "pattern": {"enum": PATTERNS},
        "format": {"enum": FORMATS},
        "const": VALUES,
        "enum": _list(VALUES, 4),
        "required": _list({"enum": NAMES}, 2) | {"uniqueItems": True},
        "uniqueItems": {"type": "boolean"},
    }
    if depth == 0:
        return _options(leaf) | {"maxProperties": 3}
    inner = _schema_of_free_schemas(depth - 1)
    more = {
        **{key: inner for key in ("items", "additionalProperties", "propertyNames", "not")},
        **{key: _list(inner) for key in ("allOf", "anyOf", "oneOf", "prefixItems")},
        "properties": _of_names(inner),
        "patternProperties": {
            "type": "object",
            "propertyNames": {"enum": PATTERNS},
            "additionalProperties": inner,
            "maxProperties": 2,
        },
    }
    return _options(leaf | more) | {"maxProperties": 4}


def _schema_of_openai_schemas(depth: int) -> dict[str, Any]:
    """Types everywhere, objects closed, as clients of OpenAI's API and pydantic write them."""
    note = {"description": {"enum": ["A note."]}}
    kinds = [
        _options(note | {"type": _one("string")}, "type"),
        _options(note | {"type": _one("string"), "pattern": {"enum": PATTERNS}}, "type", "pattern"),
        _options({"type": _one("string"), "format": {"enum": FORMATS}}, "type", "format"),
        _options({"type": _one("string"), "minLength": COUNT, "maxLength": _one(9)}, "type"),
        _options({"type": {"enum": ["integer", "number"]}, "minimum": NUMBER}, "type"),
        _options({"type": _one("integer"), "minimum": COUNT, "maximum": _one(40)}, "type"),
        _options({"type": {"enum": ["boolean", "null"]}}, "type"),
        _options({"type": _one("string"), "enum": _list({"enum": NAMES}, 4)}, "type", "enum"),
        _options({"const": VALUES}, "const"),
    ]
    if depth > 0:
        inner = _schema_of_openai_schemas(depth - 1)
        either = {"type": "array", "items": inner, "minItems": 2, "maxItems": 2}
        kinds += [
            _options({"type": _one("array"), "items": inner, "maxItems": _one(4)}, "type", "items"),
            _options({"anyOf": either}, "anyOf"),
            _object(inner),
            _object(inner),
        ]
    return {"anyOf": kinds}


def _object(inner: dict[str, Any]) -> dict[str, Any]:
    required = {"type": "array", "items": {"enum": NAMES}, "maxItems": 2, "uniqueItems": True}
    properties = {
        "type": _one("object"),
        "properties": _of_names(inner),
        "required": required,
        "additionalProperties": {"enum": [False, False, True]},
    }
    return _options(properties, *properties)


def free_schemas() -> st.SearchStrategy[Any]:
    """Schemas with any keyword beside any other; many ask for nothing that there is."""
    return from_schema(_schema_of_free_schemas(1))


def openai_schemas() -> st.SearchStrategy[Any]:
    return from_schema(_schema_of_openai_schemas(2))
