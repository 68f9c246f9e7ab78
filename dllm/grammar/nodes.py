"""What a lowered schema is made of. Fields are the keywords of xgrammar's JSON schemas."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Node:
    """Any value, where it is none of the kinds below."""


@dataclass(frozen=True)
class Values(Node):
    enum: tuple[Any, ...]


@dataclass(frozen=True)
class Reference(Node):
    name: str  # of a definition


@dataclass(frozen=True)
class Choice(Node):
    any_of: tuple[Node, ...]


@dataclass(frozen=True)
class Number(Node):
    type: Literal["integer", "number"]
    minimum: float | None = None
    exclusive_minimum: float | None = None
    maximum: float | None = None
    exclusive_maximum: float | None = None
    multiple_of: int | None = None


@dataclass(frozen=True)
class Text(Node):
    pattern: str | None = None  # of `patterns.held`
    type: str = "string"


@dataclass(frozen=True)
class Items(Node):
    prefix_items: tuple[Node, ...]  # all of them are written
    items: Node | Literal[False]  # what follows
    min_items: int | None = None
    max_items: int | None = None
    type: str = "array"


@dataclass(frozen=True)
class Members(Node):
    properties: Mapping[str, Node]
    required: tuple[str, ...] = ()
    additional_properties: Node | Literal[False] = False
    pattern_properties: Mapping[str, Node] = field(default_factory=dict)
    min_properties: int | None = None
    max_properties: int | None = None
    type: str = "object"


@dataclass(frozen=True)
class Lowered:
    """A whole schema, and what its references name."""

    root: Node
    definitions: Mapping[str, Node]

    def schema(self) -> dict[str, Any]:
        definitions = {"$defs": schema_of(self.definitions)} if self.definitions else {}
        return definitions | schema_of(self.root)


def schema_of(node: Any) -> Any:
    """The JSON schema of a node, of nodes by name or of a tuple of nodes."""
    if isinstance(node, Reference):
        return {"$ref": f"#/$defs/{node.name}"}
    if isinstance(node, Mapping):
        return {name: schema_of(one) for name, one in node.items()}
    if isinstance(node, tuple):
        return [schema_of(one) for one in node]
    if not isinstance(node, Node):
        return node
    given = {_keyword(part.name): getattr(node, part.name) for part in fields(node)}
    return {key: schema_of(one) for key, one in given.items() if one not in (None, (), {})}


def _keyword(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)
