"""Gemma 4's tool calls as a structural tag of xgrammar.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>

Neither xgrammar nor vLLM has a tag for this syntax. Properties come in the order of the alphabet,
which is the order in which Gemma's chat template lists them. Only properties that a schema declares
are written; an object that declares none may have any.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    ConstStringFormat,
    Format,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    StarFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

from dllm.grammar.compile import MOST_TEXT
from dllm.grammar.lowering import lower
from dllm.grammar.patterns import IN_GEMMA, rewritten
from dllm.grammar.rules import Unsupported

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
ANY_STRING = r"([^<]|<+[^<|])*"  # without QUOTE, also where it meets the one that ends it
PLAIN_NAME = r"[^\s:,{}\[\]<>]+"
MOST_PARTS = 10_000  # made for all schemas: as JSON, so many come to about MOST_TEXT bytes, or more
ANY_NAME = "[A-Za-z_][A-Za-z0-9_]*"
DEEPEST = 12  # levels of schemas, one inside the other
SCALARS = ("integer", "number", "boolean", "null")
# Keywords that change nothing, or that are read below.
KNOWN = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "title", "description", "default", "examples", "$schema", "strict"),
    *("nullable", "deprecated", "readOnly", "writeOnly", "$id", "$comment", "discriminator"),
}


def structural_tag(tools: Sequence[tuple[str, Any]], tool_choice: str) -> StructuralTag:
    """The tag of answers with calls.

    Args:
        tools: names, and JSON schemas of their arguments.
        tool_choice: ``auto``: text with or without calls; ``required``: calls alone; ``forced``:
            one call.

    Raises:
        Unsupported: a schema asks for what cannot be held to in this syntax.
    """
    schemas = [schema if isinstance(schema, Mapping) else {} for _, schema in tools]
    length = len(json.dumps(schemas))
    if length > MOST_TEXT:  # before any of them is looked at
        raise Unsupported(
            f"The tools' schemas have {length:,} bytes; allowed: {MOST_TEXT:,}. Make them shorter."
        )
    writer = _Writer()
    tags = [
        TagFormat(
            begin=f"{BEGIN}call:{name}{{",
            content=writer.arguments(schema),
            end=f"}}{END}",
        )
        for (name, _), schema in zip(tools, schemas, strict=True)
    ]
    lengths: dict[int, int] = {}
    if sum(_length(tag.content, lengths) for tag in tags) > MOST_TEXT:
        raise _too_large()
    if tool_choice == "auto":
        return StructuralTag(format=TriggeredTagsFormat(triggers=[BEGIN], tags=tags))
    return StructuralTag(
        format=TagsWithSeparatorFormat(
            tags=tags,
            separator="",
            at_least_one=True,
            stop_after_first=tool_choice == "forced",
        )
    )


def _too_large() -> Unsupported:
    return Unsupported(
        f"The tools' schemas come to more than {MOST_TEXT:,} bytes with references, items of lists "
        "and orders of properties written out. Make them smaller: fewer optional properties, "
        "shorter lists, fewer references."
    )


def _length(part: Any, known: dict[int, int]) -> int:
    """About the length of a format as JSON, where a part is written as often as it is used.

    Args:
        known: lengths of the parts, each of which is looked at once.
    """
    if id(part) not in known:
        inner = [*getattr(part, "elements", ()), *filter(None, [getattr(part, "content", None)])]
        own = 0 if inner else len(part.model_dump_json())
        known[id(part)] = own + sum(_length(one, known) for one in inner)
    return known[id(part)]


class _Writer:
    """Writes the formats of schemas, one schema after the other.

    It counts what it makes, so that a small schema does not keep the server busy.
    """

    def __init__(self) -> None:
        self._num_parts = 0

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > MOST_PARTS:
            raise _too_large()

    def arguments(self, schema: Mapping[str, Any]) -> Format:
        """What stands between the braces of a call."""
        lower(schema)
        self._root: Any = schema
        self._made: dict[tuple[int, int], Format] = {}  # of (schema, depth)
        for _ in range(DEEPEST):
            if "$ref" in schema:
                schema = _checked(self._referenced(str(schema["$ref"])))
        if {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"} & set(schema):
            raise Unsupported("A tool's arguments are no plain object. Declare its properties.")
        return self._members(schema, 0)

    def _value(self, schema: Any, depth: int) -> Format:
        key = id(schema), depth
        if key not in self._made:
            self._count(1)
            is_any = schema is True or schema == {}
            made = _any_scalar() if is_any else self._made_of(_checked(schema), depth)
            self._made[key] = made
        return self._made[key]

    def _made_of(self, schema: Mapping[str, Any], depth: int) -> Format:
        if depth > DEEPEST:
            raise Unsupported(
                f"A tool's schema is nested deeper than {DEEPEST} levels, or is recursive. Make it "
                "flatter."
            )
        if unknown := sorted(set(schema) - KNOWN):
            raise Unsupported(
                f"A tool's schema uses {unknown[0]!r}, which Gemma's calls cannot be held to. "
                "Leave it out."
            )
        if "$ref" in schema:
            return self._value(self._referenced(str(schema["$ref"])), depth + 1)
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            self._count(len(values))
            return _one_of([_constant(value) for value in values])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                if key == "allOf" and len(schema[key]) != 1:
                    raise Unsupported("A tool's schema uses 'allOf'. Write one schema instead.")
                return _one_of([self._value(one, depth + 1) for one in schema[key]])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return _any_scalar()
        kinds = [kinds] if isinstance(kinds, str) else dict.fromkeys(kinds)
        return _one_of([self._of_kind(kind, schema, depth) for kind in kinds])

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> Format:
        if kind in SCALARS:
            bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            kept = {key: schema[key] for key in bounds if key in schema}
            return JSONSchemaFormat(json_schema={"type": kind} | kept)
        if kind == "string":
            return _string(schema)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            members = self._members(schema, depth)
            return SequenceFormat(elements=[_text("{"), members, _text("}")])
        raise Unsupported(f"A tool's schema has the type {kind!r}, which JSON Schema has not.")

    def _array(self, schema: Mapping[str, Any], depth: int) -> Format:
        item = self._value(schema.get("items", True), depth + 1)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        self._count(max(least, int(most or 0)))
        if most is not None and int(most) < least:
            raise Unsupported(f"A tool's schema has minItems {least} and maxItems {most}.")
        more = SequenceFormat(elements=[_text(","), item])
        rest: list[Format] = [more] * max(least - 1, 0)
        if most is None:
            rest.append(StarFormat(content=more))
        else:
            rest += [OptionalFormat(content=more)] * (int(most) - max(least, 1))
        filled = SequenceFormat(elements=[item, *rest])
        if most == 0:
            return _text("[]")
        inside: Format = filled if least else OptionalFormat(content=filled)
        return SequenceFormat(elements=[_text("["), inside, _text("]")])

    def _members(self, schema: Mapping[str, Any], depth: int) -> Format:
        """``key:value`` pairs with commas between them. Which comes first decides the rest."""
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            return self._any_members()
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if undeclared := sorted(required - set(properties)):
            raise Unsupported(
                f"A tool's schema requires {undeclared[0]!r} and does not declare it."
            )
        names = sorted(properties)
        for name in names:
            if not re.fullmatch(PLAIN_NAME, name):
                raise Unsupported(
                    f"A tool's property is called {name[:40]!r}; allowed: {PLAIN_NAME}"
                )
        pairs = {
            name: SequenceFormat(
                elements=[_text(f"{name}:"), self._value(properties[name], depth + 1)]
            )
            for name in names
        }
        ways: list[Format] = []
        for place, first in enumerate(names):
            self._count(len(names) - place)
            behind: list[Format] = []
            for name in names[place + 1 :]:
                pair = SequenceFormat(elements=[_text(","), pairs[name]])
                behind.append(pair if name in required else OptionalFormat(content=pair))
            ways.append(SequenceFormat(elements=[pairs[first], *behind]))
            if first in required:
                return _one_of(ways)
        return OptionalFormat(content=_one_of(ways)) if ways else _text("")

    def _any_members(self) -> Format:
        """Of an object that declares nothing: any names, with values that are not nested."""
        pair = SequenceFormat(elements=[RegexFormat(pattern=f"{ANY_NAME}:"), _any_scalar()])
        more = StarFormat(content=SequenceFormat(elements=[_text(","), pair]))
        return OptionalFormat(content=SequenceFormat(elements=[pair, more]))

    def _referenced(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#/").split("/"):
            if not isinstance(found, Mapping) or part not in found:
                raise Unsupported(f"A tool's schema refers to {reference!r}, which is not in it.")
            found = found[part]
        return found


def _checked(schema: Any) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise Unsupported(
            f"A tool's schema has {json.dumps(schema)[:40]} in the place of a schema; allowed: "
            "an object, or true."
        )
    return schema


def _text(value: str) -> ConstStringFormat:
    return ConstStringFormat(value=value)


def _one_of(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else OrFormat(elements=list(formats))


@cache
def _any_scalar() -> Format:
    return _one_of([_string({}), *(JSONSchemaFormat(json_schema={"type": k}) for k in SCALARS)])


def _string(schema: Mapping[str, Any]) -> Format:
    pattern = ANY_STRING
    if "pattern" in schema:
        if "minLength" in schema or "maxLength" in schema:
            raise Unsupported(
                "A tool's schema has a 'pattern' and a length. Leave one of them out."
            )
        pattern = rewritten(str(schema["pattern"]), IN_GEMMA)
    elif "minLength" in schema or "maxLength" in schema:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        pattern = f"[^<]{{{int(schema.get('minLength', 0))},{most}}}"
    return SequenceFormat(elements=[_text(QUOTE), RegexFormat(pattern=pattern), _text(QUOTE)])


def _constant(value: Any) -> Format:
    if isinstance(value, str):
        if QUOTE in value or value.endswith("<"):
            raise Unsupported(f"A tool's schema has the value {value[:40]!r}, which ends a string.")
        return _text(f"{QUOTE}{value}{QUOTE}")
    if isinstance(value, bool) or value is None:
        return _text({True: "true", False: "false", None: "null"}[value])
    if isinstance(value, int | float):
        return _text(str(value))
    raise Unsupported("A tool's schema has an 'enum' of objects or lists. Leave it out.")
