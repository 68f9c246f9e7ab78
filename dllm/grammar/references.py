"""A JSON schema as a document: its parts, what their references name, which values they allow."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

from dllm.grammar.patterns import is_found
from dllm.grammar.refusals import Unsupported


@dataclass(frozen=True)
class Part:
    """A schema inside of a document.

    Two parts are equal if they are the same place of the document.

    Attributes:
        path: where it stands, as a JSON pointer.
        resolver: what its references are relative to.
    """

    schema: Any = field(compare=False)
    path: str = field(compare=False)
    resolver: Any = field(compare=False)
    _key: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", id(self.schema))

    def inner(self, *keys: str | int) -> "Part":
        schema = self.schema
        for key in keys:
            schema = schema[key]
        return part_at(schema, "/".join([self.path, *map(str, keys)]), self.resolver)


def canonical(value: Any) -> str:
    """The text that equal values of JSON share: 1 and 1.0 are equal, true and 1 are not."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, set | tuple):  # of alternatives
            return sorted(map(plain, value), key=repr)
        if isinstance(value, Part):
            return id(value.schema)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(value), sort_keys=True)


def part_at(schema: Any, path: str, resolver: Any) -> Part:
    """A part, whose references are relative to its own ``$id`` if it has one."""
    if not isinstance(schema, dict | bool):
        refuse(path.rsplit("/", 1)[-1], path, "a schema is an object, true or false")
    if isinstance(schema, dict) and isinstance(schema.get("$id"), str):
        resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
    return Part(schema, path, resolver)


NOTES = {"title", "description", "default", "examples", "$comment"}  # limit nothing


def refuse(keyword: str, path: str, why: str = "answers cannot be held to it") -> NoReturn:
    """Raise Unsupported, with the keyword of a schema and where it stands."""
    raise Unsupported(f"The schema uses {keyword!r} at '{path or '#'}': {why}. Leave it out.")


class Document:
    """One schema."""

    def __init__(self, schema: Any) -> None:
        self._listed: dict[int, set[str]] = {}  # of each list of values
        resource = DRAFT202012.create_resource(schema)
        named = (schema.get("$id"), schema.get("id")) if isinstance(schema, dict) else ()  # draft 4
        base = next((one.rstrip("#") for one in named if isinstance(one, str)), "")
        self._registry = referencing.Registry().with_resource(base, resource)
        self.root = part_at(schema, "#", self._registry.resolver(base))

    @cached_property
    def _validator(self) -> Any:
        """The class that checks values; most schemas need none."""
        own = {"pattern": _pattern, "patternProperties": _pattern_properties, "enum": self._enum}
        own["additionalProperties"] = _additional_properties
        own |= {key: _refused(key) for key in ("unevaluatedItems", "unevaluatedProperties")}
        return jsonschema.validators.extend(jsonschema.Draft202012Validator, own)

    def meant(self, part: Part) -> Part:
        """The part itself, or what it refers to if it says nothing else."""
        is_alone = isinstance(part.schema, dict) and {*part.schema} - NOTES == {"$ref"}
        return self.referenced(part) if is_alone else part

    def referenced(self, part: Part) -> Part:
        reference = part.schema["$ref"]
        try:
            found = part.resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError, TypeError, AttributeError):
            refuse("$ref", part.path, f"{reference!r} is not in the schema")
        path = reference if reference.startswith("#") else f"{part.path}/$ref"
        if not isinstance(found.contents, dict | bool):
            refuse("$ref", part.path, f"{reference!r} is no schema")
        return Part(found.contents, path, found.resolver)  # which is relative to its $id already

    def allows(self, part: Part, value: Any) -> bool:
        """Whether a value is of a part, by the ``jsonschema`` package; formats are checked."""
        validator = self._validator(
            part.schema,
            registry=self._registry,
            _resolver=part.resolver,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
        try:
            return bool(validator.is_valid(value))
        except referencing.exceptions.Unresolvable as error:
            refuse("$ref", part.path, f"{error.ref!r} is not in the schema")

    def _enum(self, validator: Any, values: Any, instance: Any, schema: Any) -> Iterator[Any]:
        """Check ``enum`` as the ``jsonschema`` package does, but by one look-up."""
        if id(values) not in self._listed:
            self._listed[id(values)] = {canonical(value) for value in values}
        if canonical(instance) not in self._listed[id(values)]:
            yield jsonschema.ValidationError("enum")


# As the package's, with patterns that are JavaScript's.


def _refused(keyword: str) -> Callable[..., Any]:
    def refused(validator: Any, given: Any, instance: Any, schema: Any) -> Any:
        refuse(keyword, "", "beside 'const' or 'enum' answers cannot be held to it")

    return refused


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not is_found(pattern, instance):
        yield jsonschema.ValidationError("pattern")


def _pattern_properties(validator: Any, given: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, inner in given.items():
            for name in instance:
                if is_found(pattern, name):
                    yield from validator.descend(instance[name], inner)


def _additional_properties(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        patterns = schema.get("patternProperties", ())
        for name in instance:
            is_known = name in schema.get("properties", ())
            if not (is_known or any(is_found(pattern, name) for pattern in patterns)):
                yield from validator.descend(instance[name], inner)
