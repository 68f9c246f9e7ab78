"""Arguments of Gemma 4's tool calls as EBNF, from a lowered JSON schema (`lowering`).

    city:<|"|>Rome<|"|>,days:3

Properties come in the order of the alphabet, in which Gemma's chat template lists them. Where a
schema declares properties, others are not written.
"""

import json
import re
from typing import Any

from dllm.grammar import nodes
from dllm.grammar.refusals import Unsupported

QUOTE = '<|"|>'
UNREAD = f"{QUOTE} arguments "  # of a tool, in a structural tag: (name, schema) in JSON follow
NOTHING = '""'  # in EBNF
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

    def __init__(self, lowered: nodes.Lowered) -> None:
        self._defs = lowered.definitions
        self._rules: dict[str, str] = {}  # names, by what they stand for
        self._others: dict[str, str] = {}  # of references and numbers, by their names
        ways = [self._members(one) for one in self._objects(lowered.root, ())]
        if not ways:
            raise Unsupported("its arguments are no object. Declare them as one.")
        rules = [f"root ::= {' | '.join(ways)}", *self._others.values()]
        rules += [f"{name} ::= {body}" for body, name in self._rules.items()]
        self.grammar = "\n".join([*rules, ANYTHING])

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def _objects(self, node: nodes.Node, seen: tuple[str, ...]) -> list[nodes.Members]:
        match node:
            case nodes.Reference(name):
                return [] if name in seen else self._objects(self._defs[name], (*seen, name))
            case nodes.Choice(options):
                return [each for one in options for each in self._objects(one, seen)]
            case nodes.Members():
                return [node]
        return [nodes.Members({}, (), node)] if node == nodes.Node() else []

    def _value(self, node: nodes.Node) -> str:
        match node:
            case nodes.Reference(name):
                rule = f"def_{name}"
                if rule not in self._others:
                    self._others[rule] = ""  # it may refer to itself
                    self._others[rule] = f"{rule} ::= {self._value(self._defs[name])}"
                return rule
            case nodes.Choice(options):
                return self._rule(" | ".join(map(self._value, options)))
            case nodes.Values(values):
                return self._rule(" | ".join(_quoted(_constant(value)) for value in values))
            case nodes.Members():
                return f'"{{" {self._members(node)} "}}"'
            case nodes.Items():
                return f'"[" {self._items(node)} "]"'
            case nodes.Text(pattern):
                inside = STRING if pattern is None else _quoted(pattern)
                return f"{_quoted(QUOTE)} {inside} {_quoted(QUOTE)}"
            case nodes.Number(kind) if node == nodes.Number(kind):
                return self._rule(INTEGER if kind == "integer" else NUMBER)
            case nodes.Number():
                return self._bounded(json.dumps(nodes.schema_of(node)))
        return "value"

    def _bounded(self, schema: str) -> str:
        """A number between bounds, as xgrammar writes it."""
        name = re.sub(r"\W", "_", schema)
        from xgrammar import Grammar  # here: it imports PyTorch

        rules = re.findall("^root.*", str(Grammar.from_json_schema(schema)), re.MULTILINE)
        self._others[name] = re.sub(r"\broot", f"{name}root", "\n".join(rules))
        return f"{name}root"

    def _items(self, node: nodes.Items) -> str:
        """Values with commas between them."""
        first, behind = [*map(self._value, node.prefix_items)], NOTHING
        if node.items is not False:
            item, least, most = self._value(node.items), node.min_items or 0, node.max_items
            first = first or [item]
            more = max(least - len(first), 0), None if most is None else most - len(first)
            behind = _repeated(self._rule(f'"," {item}'), *more)
        items = ' "," '.join(first) + f" {behind}"
        return items if node.min_items or not first else f"({items})?"

    def _members(self, node: nodes.Members) -> str:
        """``key:value`` pairs with commas between them."""
        properties, required = node.properties, node.required
        least, most = node.min_properties or 0, node.max_properties
        if node.pattern_properties:
            raise _not_held("patternProperties")
        if not properties and node.additional_properties is not False:
            return self._any_members(node.additional_properties, least, most)
        if least > len(required) or (most is not None and most < len(properties)):
            raise _not_held("minProperties" if least > len(required) else "maxProperties")
        first = behind = NOTHING  # of the names so far
        for name in sorted(properties, reverse=True):
            if not re.fullmatch(NAME, name) or name != name.strip():
                raise Unsupported(
                    f"it has a property called {name[:40]!r}; allowed: names without any of "
                    "':,{}[]<>', line ends and spaces around them. Rename it."
                )
            pair = f"{_quoted(f'{name}:')} {self._value(properties[name])}"
            is_optional = name not in required
            first = self._rule(f"{pair} {behind}" + f" | {first}" * is_optional)
            behind = self._rule(f'"," {pair} {behind}' + f" | {behind}" * is_optional)
        return first

    def _any_members(self, value: nodes.Node, least: int, most: int | None) -> str:
        """Pairs with any names, some of which may be equal."""
        if least > 1:
            raise _not_held("minProperties")
        if most == 0:
            return NOTHING
        pair = self._rule(f'{NAME} ":" {self._value(value)}')
        behind = _repeated(self._rule(f'"," {pair}'), 0, most and most - 1)
        return f"{pair} {behind}" if least else f"({pair} {behind})?"


def _not_held(key: str) -> Unsupported:
    return Unsupported(
        f"its schema uses {key!r}, which Gemma's calls are not held to. Leave it out."
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _repeated(rule: str, least: int, most: int | None) -> str:
    return NOTHING if most == 0 else f"{rule}{{{least},{'' if most is None else most}}}"


def _constant(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if not re.fullmatch(STRING, value):
        raise Unsupported(f"its schema has the value {value[:40]!r}, which has a mark of calls.")
    return f"{QUOTE}{value}{QUOTE}"
