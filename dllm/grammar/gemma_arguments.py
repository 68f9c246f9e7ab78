"""Arguments of Gemma 4's tool calls as EBNF, from a lowered JSON schema (`lowering`).

    city:<|"|>Rome<|"|>,days:3

Properties come in the order of the alphabet, in which Gemma's chat template lists them. Where a
schema declares properties, others are not written.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from dllm.grammar.refusals import Unsupported

QUOTE = '<|"|>'
UNREAD = f"{QUOTE} arguments "  # of a tool, in a structural tag: (name, schema) in JSON follow
NOTHING = '""'  # in EBNF
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Regular expressions that are also EBNF.
NAME = r"[^\0-\x20:,{}\[\]<>]+([\x20][^\0-\x20:,{}\[\]<>]+)*"
INTEGER = "[0]|[-]?[1-9][0-9]*"
NUMBER = "[-]?([0]|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]{1,2})?"  # finite as a double
# Without "<|" and without "<tool_call|>" and the like, which vLLM reads as marks in strings, too.
STRING = "[^<]*([<]([^<|a-z_][^<]*|[a-z_]+([^<|a-z_][^<]*|[|]([^<>][^<]*)?)?)?)*"
ANYTHING = rf"""members ::= (pair ("," pair)*)?
pair ::= {NAME} ":" value
value ::= string | {NUMBER} | "true" | "false" | "null" | "{{" members "}}" | "[" list "]"
list ::= (value ("," value)*)?
string ::= "<|\"|>" {STRING} "<|\"|>"
"""


class Writer:
    """Writes the arguments of a lowered schema (``lowering``) as EBNF: ``grammar``."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._defs: Mapping[str, Any] = schema.get("$defs", {})
        self._rules: dict[str, str] = {}  # names, by what they stand for
        self._others: dict[str, str] = {}  # of references and numbers, by their names
        ways = [self._members(one) for one in self._objects(schema, ())]
        if not ways:
            raise Unsupported("its arguments are no object. Declare them as one.")
        rules = [f"root ::= {' | '.join(ways)}", *self._others.values()]
        rules += [f"{name} ::= {body}" for body, name in self._rules.items()]
        self.grammar = "\n".join([*rules, ANYTHING])

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def _objects(self, schema: Mapping[str, Any], seen: tuple[str, ...]) -> list[Mapping[str, Any]]:
        if "$ref" in schema:
            name = schema["$ref"]
            return [] if name in seen else self._objects(self._referenced(name), (*seen, name))
        if "anyOf" in schema:
            return [each for one in schema["anyOf"] for each in self._objects(one, seen)]
        if "enum" in schema:
            raise Unsupported("its arguments have 'enum'. Declare the values of each property.")
        return [schema] if schema.get("type", "object") == "object" else []

    def _referenced(self, reference: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._defs[reference.removeprefix("#/$defs/")]
        return found

    def _value(self, schema: Mapping[str, Any]) -> str:
        if "$ref" in schema:
            name = schema["$ref"].replace("#/$defs/", "def_")
            if name not in self._others:
                self._others[name] = ""  # it may refer to itself
                self._others[name] = f"{name} ::= {self._value(self._referenced(schema['$ref']))}"
            return name
        if "anyOf" in schema:
            return self._rule(" | ".join(map(self._value, schema["anyOf"])))
        if "enum" in schema:
            return self._rule(" | ".join(_quoted(_constant(value)) for value in schema["enum"]))
        match schema.get("type"):
            case None:
                return "value"
            case "object":
                return f'"{{" {self._members(schema)} "}}"'
            case "array":
                return f'"[" {self._items(schema)} "]"'
            case "string":
                return _string(schema)
            case "boolean":
                return self._rule('"true" | "false"')
            case "null":
                return '"null"'
            case kind:
                kept = {key: schema[key] for key in OF_NUMBERS if key in schema}
                if not kept:
                    return self._rule(NUMBER if kind == "number" else INTEGER)
                return self._bounded(json.dumps({"type": kind} | kept))

    def _bounded(self, schema: str) -> str:
        """A number between bounds, as xgrammar writes it."""
        name = re.sub(r"\W", "_", schema)
        from xgrammar import Grammar  # here: it imports PyTorch

        rules = re.findall("^root.*", str(Grammar.from_json_schema(schema)), re.MULTILINE)
        self._others[name] = re.sub(r"\broot", f"{name}root", "\n".join(rules))
        return f"{name}root"

    def _items(self, schema: Mapping[str, Any]) -> str:
        """Values with commas between them; ``prefixItems`` are all written (``lowering``)."""
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        if most == 0:
            return NOTHING
        first, behind = [self._value(one) for one in schema.get("prefixItems", ())], NOTHING
        if schema["items"] is not False:
            item = self._value(schema["items"])
            first = first or [item]
            more = max(least - len(first), 0), max(most - len(first), -1)
            behind = _repeated(self._rule(f'"," {item}'), *more)
        items = ' "," '.join(first) + f" {behind}"
        return items if least else f"({items})?"

    def _members(self, schema: Mapping[str, Any]) -> str:
        """``key:value`` pairs with commas between them."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", {})
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", -1)
        if "patternProperties" in schema:
            raise _not_held("patternProperties")
        if not properties and others is not False:
            return self._any_members(others, least, most)
        if least > len(required) or 0 <= most < len(properties):
            raise _not_held("minProperties" if least > len(required) else "maxProperties")
        first = behind = NOTHING  # of the names so far
        for name in sorted(properties, reverse=True):
            _check_name(name)
            pair = f"{_quoted(f'{name}:')} {self._value(properties[name])}"
            is_optional = name not in required
            first = self._rule(f"{pair} {behind}" + f" | {first}" * is_optional)
            behind = self._rule(f'"," {pair} {behind}' + f" | {behind}" * is_optional)
        return first

    def _any_members(self, schema: Mapping[str, Any], least: int, most: int) -> str:
        """Pairs with any names, some of which may be equal."""
        if least > 1:
            raise _not_held("minProperties")
        if most == 0:
            return NOTHING
        pair = self._rule(f'{NAME} ":" {self._value(schema)}')
        behind = _repeated(self._rule(f'"," {pair}'), 0, max(most - 1, -1))
        return f"{pair} {behind}" if least else f"({pair} {behind})?"


def _not_held(key: str) -> Unsupported:
    return Unsupported(
        f"its schema uses {key!r}, which Gemma's calls are not held to. Leave it out."
    )


def _check_name(name: str) -> None:
    if not re.fullmatch(NAME, name) or name != name.strip():
        raise Unsupported(
            f"it has a property called {name[:40]!r}; allowed: names without any of "
            "':,{}[]<>', line ends and spaces around them. Rename it."
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _repeated(rule: str, least: int, most: int) -> str:
    """``most`` is -1 for any number."""
    return NOTHING if most == 0 else f"{rule}{{{least},{most if most > 0 else ''}}}"


def _string(schema: Mapping[str, Any]) -> str:
    inside = STRING
    if "pattern" in schema:
        inside = _quoted(schema["pattern"])
    elif "minLength" in schema or "maxLength" in schema:
        inside = f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return f"{_quoted(QUOTE)} {inside} {_quoted(QUOTE)}"


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
