"""Gemma 4's tool calls as a structural tag of xgrammar.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>

Neither xgrammar nor vLLM has a tag for this syntax. Properties come in the order of the alphabet,
which is the order in which Gemma's chat template lists them. Where a schema declares properties,
others are not written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    RepeatFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

from dllm.grammar.compile import MOST_TEXT
from dllm.grammar.lowering import lower
from dllm.grammar.patterns import IN_GEMMA
from dllm.grammar.refusals import Unsupported

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT, ANSWER = "<|channel>", "<channel|>"  # around a thought
MOST_PARTS = 10_000  # made for all schemas: as JSON, so many come to about MOST_TEXT bytes, or more
DEEPEST = 12  # levels of schemas, one inside the other
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Regular expressions that are also EBNF.
NAME = r"[^\0-\x20:,{}\[\]<>]+([\x20][^\0-\x20:,{}\[\]<>]+)*"
NUMBER = "[-]?([0]|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]{1,2})?"  # finite as a double
# Without "<|" and without "<tool_call|>" and the like, which vLLM reads as marks in strings, too.
STRING = "[^<]*([<]([^<|a-z_][^<]*|[a-z_]+([^<|a-z_][^<]*|[|]([^<>][^<]*)?)?)?)*"
ANYTHING = rf"""
members ::= (pair ("," pair)*)?
pair ::= {NAME} ":" value
value ::= string | {NUMBER} | "true" | "false" | "null" | "{{" members "}}" | "[" list "]"
list ::= (value ("," value)*)?
string ::= "<|\"|>" {STRING} "<|\"|>"  # {QUOTE}
"""  # The last line names the special token as it is spelled, which admits it (``compile``).


def structural_tag(tools: Sequence[tuple[str, Any]], tool_choice: str) -> StructuralTag:
    """The tag of answers with calls.

    Args:
        tools: names, and JSON schemas of their arguments; True for a tool that is not strict, whose
            calls have any arguments.
        tool_choice: ``auto``: text with or without calls; ``required``: calls alone; ``forced``:
            one call.

    Raises:
        Unsupported: a schema asks for what cannot be held to in this syntax.
    """
    tags = [*_tags(json.dumps(tools))]
    if tool_choice == "auto":
        # Without a reasoning parser, thoughts are text, too.
        thought = TagFormat(begin=THOUGHT, content=AnyTextFormat(excludes=[BEGIN]), end=ANSWER)
        text = TriggeredTagsFormat(triggers=[BEGIN], tags=tags)
        return StructuralTag(
            format=SequenceFormat(elements=[OptionalFormat(content=thought), text])
        )
    return StructuralTag(
        format=TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
        )
    )


@lru_cache(maxsize=16)
def _tags(written: str) -> tuple[TagFormat, ...]:
    """A tag for the calls of each tool.

    Args:
        written: the tools, as JSON.
    """
    tools = json.loads(written)
    length = len(json.dumps([schema for _, schema in tools]))
    if length > MOST_TEXT:  # before any of them is looked at
        raise Unsupported(
            f"The tools' schemas have {length:,} bytes; allowed: {MOST_TEXT:,}. Make them shorter."
        )
    writer = _Writer()
    tags = []
    for name, schema in tools:
        try:
            content = writer.arguments(lower(schema, IN_GEMMA))
        except Unsupported as reason:
            raise Unsupported(f"The tool {name[:40]!r}: {reason}") from reason
        tags.append(TagFormat(begin=f"{BEGIN}call:{name}{{", content=content, end=f"}}{END}"))
    lengths: dict[int, int] = {}
    if sum(_length(tag.content, lengths) for tag in tags) > MOST_TEXT:
        raise _too_large()
    return tuple(tags)


def _too_large() -> Unsupported:
    return Unsupported(
        f"The tools' schemas come to more than {MOST_TEXT:,} bytes with references "
        "and orders of properties written out. Make them smaller: fewer optional properties, "
        "fewer references."
    )


def _length(part: Any, known: dict[int, int]) -> int:
    """About the length of a format as JSON, where a part is written as often as it is used.

    Args:
        known: lengths of parts, so that each is computed once.
    """
    if id(part) not in known:
        inner = [*getattr(part, "elements", ()), *filter(None, [getattr(part, "content", None)])]
        own = 0 if inner else len(part.model_dump_json())
        known[id(part)] = own + sum(_length(one, known) for one in inner)
    return known[id(part)]


class _Writer:
    """Writes the formats of lowered schemas (``lowering``), one schema after the other.

    It counts what it makes, so that a small schema does not keep the server busy.
    """

    def __init__(self) -> None:
        self._num_parts = 0

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > MOST_PARTS:
            raise _too_large()

    def arguments(self, schema: Mapping[str, Any]) -> Format:
        self._defs: Mapping[str, Any] = schema.get("$defs", {})
        self._made: dict[tuple[int, int], Format] = {}  # of (schema, depth)
        ways = [self._members(one, 0) for one in self._objects(schema, 0)]
        if not ways:
            raise Unsupported("its arguments are no object. Declare them as one.")
        return _one_of(ways)

    def _objects(self, schema: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
        _check_depth(depth)
        if "$ref" in schema:
            return self._objects(self._referenced(schema), depth + 1)
        if "anyOf" in schema:
            return [each for one in schema["anyOf"] for each in self._objects(one, depth + 1)]
        if "enum" in schema:
            raise Unsupported("its arguments have 'enum'. Declare the values of each property.")
        return [schema] if schema.get("type", "object") == "object" else []

    def _value(self, schema: Mapping[str, Any], depth: int) -> Format:
        key = id(schema), depth
        if key not in self._made:
            self._count(1)
            _check_depth(depth)
            self._made[key] = self._made_of(schema, depth)
        return self._made[key]

    def _made_of(self, schema: Mapping[str, Any], depth: int) -> Format:
        if "$ref" in schema:
            return self._value(self._referenced(schema), depth + 1)
        if "anyOf" in schema:
            return _one_of([self._value(one, depth + 1) for one in schema["anyOf"]])
        if "enum" in schema:
            self._count(len(schema["enum"]))
            return _one_of([_text(_constant(value)) for value in schema["enum"]])
        match schema.get("type"):
            case None:
                return _anything("value")
            case "object":
                members = self._members(schema, depth)
                return SequenceFormat(elements=[_text("{"), members, _text("}")])
            case "array":
                items = self._items(schema, depth)
                return SequenceFormat(elements=[_text("["), items, _text("]")])
            case "string":
                return _string(schema)
            case kind:
                kept = {key: schema[key] for key in OF_NUMBERS if key in schema}
                if kind == "number" and not kept:
                    return RegexFormat(pattern=NUMBER)
                return JSONSchemaFormat(json_schema={"type": kind} | kept)

    def _items(self, schema: Mapping[str, Any], depth: int) -> Format:
        """Values with commas between them; ``prefixItems`` are all written (``lowering``)."""
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        if most == 0:
            return _text("")
        first = [self._value(one, depth + 1) for one in schema.get("prefixItems", ())]
        behind: Format = _text("")
        if schema["items"] is not False:
            item = self._value(schema["items"], depth + 1)
            first = first or [item]
            more = max(least - len(first), 0), max(most - len(first), -1)
            behind = _repeated(_behind_a_comma(item), *more)
        commas = [_behind_a_comma(one) for one in first[1:]]
        items = SequenceFormat(elements=[first[0], *commas, behind])
        return items if least else OptionalFormat(content=items)

    def _members(self, schema: Mapping[str, Any], depth: int) -> Format:
        """``key:value`` pairs with commas between them. Which comes first decides the rest."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", {})
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", -1)
        if "patternProperties" in schema:
            raise _not_held("patternProperties")
        if not properties and others is not False:
            return self._any_members(others, least, most, depth)
        if least > len(required) or 0 <= most < len(properties):
            raise _not_held("minProperties" if least > len(required) else "maxProperties")
        names = sorted(properties)
        pairs = {name: self._pair(name, properties[name], depth) for name in names}
        ways: list[Format] = []
        for place, first in enumerate(names):
            self._count(len(names) - place)
            behind: list[Format] = []
            for name in names[place + 1 :]:
                pair = _behind_a_comma(pairs[name])
                behind.append(pair if name in required else OptionalFormat(content=pair))
            ways.append(SequenceFormat(elements=[pairs[first], *behind]))
            if first in required:
                return _one_of(ways)
        return OptionalFormat(content=_one_of(ways)) if ways else _text("")

    def _any_members(self, schema: Mapping[str, Any], least: int, most: int, depth: int) -> Format:
        """Pairs with any names, some of which may be equal."""
        if least > 1:
            raise _not_held("minProperties")
        if most == 0:
            return _text("")
        if schema == {} and least == 0 and most < 0:
            return _anything("members")
        value = self._value(schema, depth + 1)
        pair = SequenceFormat(elements=[RegexFormat(pattern=f"{NAME}:"), value])
        behind = _repeated(_behind_a_comma(pair), 0, max(most - 1, -1))
        pairs = SequenceFormat(elements=[pair, behind])
        return pairs if least else OptionalFormat(content=pairs)

    def _pair(self, name: str, schema: Mapping[str, Any], depth: int) -> Format:
        _check_name(name)
        return SequenceFormat(elements=[_text(f"{name}:"), self._value(schema, depth + 1)])

    def _referenced(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._defs[schema["$ref"].removeprefix("#/$defs/")]
        return found


def _not_held(key: str) -> Unsupported:
    return Unsupported(
        f"its schema uses {key!r}, which Gemma's calls are not held to. Leave it out."
    )


def _check_depth(depth: int) -> None:
    if depth > DEEPEST:
        raise Unsupported(
            f"its schema is nested deeper than {DEEPEST} levels, or is recursive. Make it flatter."
        )


def _check_name(name: str) -> None:
    if not re.fullmatch(NAME, name) or name != name.strip():
        raise Unsupported(
            f"it has a property called {name[:40]!r}; allowed: names without any of "
            "':,{}[]<>', line ends and spaces around them. Rename it."
        )


def _text(value: str) -> ConstStringFormat:
    return ConstStringFormat(value=value)


def _behind_a_comma(content: Format) -> Format:
    return SequenceFormat(elements=[_text(","), content])


def _one_of(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else OrFormat(elements=list(formats))


def _repeated(content: Format, least: int, most: int) -> Format:
    """``most`` is -1 for any number."""
    return _text("") if most == 0 else RepeatFormat(min=least, max=most, content=content)


@cache
def _anything(rule: str) -> Format:
    """Any ``value``, or any ``members`` of an object, nested or not."""
    return GrammarFormat(grammar=f"root ::= {rule}{ANYTHING}")


def _string(schema: Mapping[str, Any]) -> Format:
    pattern = STRING
    if "pattern" in schema:
        pattern = schema["pattern"]
    elif "minLength" in schema or "maxLength" in schema:
        pattern = f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return SequenceFormat(elements=[_text(QUOTE), RegexFormat(pattern=pattern), _text(QUOTE)])


def _constant(value: Any) -> str:
    if isinstance(value, Mapping):
        for name in value:
            _check_name(name)
        return "{" + ",".join(f"{key}:{_constant(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_constant(one) for one in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if not re.fullmatch(STRING, value):
        raise Unsupported(f"its schema has the value {value[:40]!r}, which has a mark of calls.")
    return f"{QUOTE}{value}{QUOTE}"
