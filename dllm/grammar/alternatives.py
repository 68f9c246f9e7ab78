"""A JSON schema as alternatives without references, ``allOf``, ``anyOf`` and ``oneOf``.

An alternative is a flat schema, a dict: a value is of the schema if it is of one of them. In it
``type`` is a set, ``enum`` a list, and each schema inside is a *conjunction*, a tuple of parts all
of which hold. Two of its keys are ours:

    path      where it stands
    unheld    what answers cannot be held to: (type that it speaks of, keyword, path). It is refused
              only where the alternative allows that type.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm.grammar.patterns import is_found
from dllm.grammar.references import Document, Part, refuse

Flat = dict[str, Any]
Conjunction = tuple[Part, ...]

TYPES = ("object", "array", "string", "number", "boolean", "null")
SPEAKS_OF = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties"),
    ),
}
TYPE_OF = {keyword: kind for kind, keywords in SPEAKS_OF.items() for keyword in keywords}
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
# Of no type, and never held.
NEVER_HELD = ("if", "not", "$dynamicRef", "$recursiveRef")
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
MOST_ALTERNATIVES = 64
DEEPEST = 64  # references, and alternatives of alternatives, one inside the other


class Alternatives:
    """Of one document.

    Args:
        is_empty: whether no value is of a flat schema; it may refuse the schema.
    """

    def __init__(self, document: Document, is_empty: Callable[[Flat], bool]) -> None:
        self.document, self._is_empty = document, is_empty

    def of(self, conjunction: Conjunction) -> list[Flat]:
        """Those of values that are of all parts."""
        found: list[Flat] = [{"path": conjunction[0].path if conjunction else "#"}]
        for part in conjunction:
            found = self._product(found, self._of_part(part, ()), part)
        return found

    def _of_part(self, part: Part, opened: tuple[Part, ...]) -> list[Flat]:
        self.document.count()
        schema = part.schema
        if isinstance(schema, bool):
            return [{"path": part.path}] if schema else []
        if part in opened or len(opened) > DEEPEST:
            refuse("$ref", part.path, "it leads back to itself, or too deep")
        opened += (part,)
        if "enum" in schema or "const" in schema:
            return self._values(part)
        found = [_flat(part)]
        for other in _beside(part, self.document):
            found = self._product(found, self._of_part(other, opened), part)
        for keyword in ("anyOf", "oneOf"):
            inner = [part.inner(keyword, at) for at in range(len(schema.get(keyword, ())))]
            each = [self._of_part(one, opened) for one in inner]
            if keyword == "oneOf":
                self._set_apart(inner, each)
            if keyword in schema:
                found = self._product(found, [flat for one in each for flat in one], part)
        for name, needed, then in _dependencies(part):
            absent = {"properties": {name: (Part(False, part.path, part.resolver),)}}
            present = [{"required": [name, *needed]}]
            for other in then:
                present = self._product(present, self._of_part(other, opened), part)
            found = self._product(found, [absent, *present], part)
        # They hold for what no schema in this place speaks of.
        for keyword, known in UNEVALUATED.items():
            if keyword in schema:
                found = [{known: (part.inner(keyword),)} | flat for flat in found]
        return found

    def _values(self, part: Part) -> list[Flat]:
        """Of a part with ``const`` or ``enum``: those of its values that the rest of it allows."""
        given = part.schema.get("enum", [part.schema.get("const")])
        if not isinstance(given, list):
            refuse("enum", part.path, "it is no list")
        self.document.count(len(given))
        rest = {key: value for key, value in part.schema.items() if key != "enum"}
        beside = Part(rest, part.path, part.resolver)
        values = [value for value in given if self.document.allows(beside, value)]
        return [{"enum": values, "path": part.path}] if values else []

    def _product(self, left: list[Flat], right: list[Flat], part: Part) -> list[Flat]:
        self.document.count(len(left) * len(right))
        if len(left) * len(right) > MOST_ALTERNATIVES:
            refuse("anyOf", part.path, f"it comes to more than {MOST_ALTERNATIVES} alternatives")
        merged = (_merged(one, other) for one in left for other in right)
        return [flat for flat in merged if flat is not None]

    def _set_apart(self, parts: list[Part], each: list[list[Flat]]) -> None:
        """Narrow alternatives of ``oneOf``, in place, so that none has a value of another part.

        Raises:
            Unsupported: it is not known how.
        """
        given = [[dict(flat) for flat in flats] for flats in each]
        for at, flats in enumerate(each):
            for other, others in enumerate(given):
                if other != at:
                    for flat in flats:
                        for its in others:
                            self._keep_out(flat, parts[at], its, parts[other])
            flats[:] = [flat for flat in flats if flat.get("enum") != []]

    def _keep_out(self, flat: Flat, part: Part, other: Flat, other_part: Part) -> None:
        """Narrow an alternative so that it has no value of another, which is of ``other_part``."""
        allows = self.document.allows
        if "enum" in flat:
            flat["enum"] = [value for value in flat["enum"] if not allows(other_part, value)]
            return
        if "enum" in other and not any(allows(part, value) for value in other["enum"]):
            return
        both = _merged(flat, other)
        if both is None or self._is_empty(both):
            return
        types = both.get("type", {TYPE_OF[key] for key in both if key in TYPE_OF})
        if types == {"object"}:
            flat["type"] = {"object"}
            declared = [one.get("properties", {}) for one in (flat, other)]
            for name in declared[0]:
                if name in declared[1] and self._differ(declared[0][name] + declared[1][name]):
                    flat["required"] = list(dict.fromkeys([*flat.get("required", ()), name]))
                    return
            for name in other.get("required", ()):
                if name not in flat.get("required", ()):
                    never = Part(False, other_part.path, other_part.resolver)
                    flat["properties"] = {**declared[0], name: (never,)}
                    return
        refuse("oneOf", part.path, "two of its schemas may hold for one value; write 'anyOf'")

    def _differ(self, conjunction: Conjunction) -> bool:
        """Whether all parts have their values listed, and none of them is of all parts."""
        if not all(isinstance(part.schema, dict) for part in conjunction):
            return False
        found = self.of(conjunction)
        return all("enum" in flat and self._allowed(flat, conjunction) == [] for flat in found)

    def _allowed(self, flat: Flat, conjunction: Conjunction) -> list[Any]:
        return [
            value
            for value in flat["enum"]
            if all(self.document.allows(part, value) for part in conjunction)
        ]


def _flat(part: Part) -> Flat:
    """The keywords of one part that are not alternatives."""
    flat: Flat = {"path": part.path, "unheld": []}
    for keyword, value in part.schema.items():
        if keyword == "type":
            flat["type"] = {value} if isinstance(value, str) else set(value)
            if unknown := flat["type"] - {*TYPES, "integer"}:
                refuse("type", part.path, f"{sorted(map(str, unknown))[0]!r} is none")
        elif keyword in UPPER + LOWER:
            if isinstance(value, bool) or not isinstance(value, int | float):
                refuse(keyword, part.path, "it is no number")
            flat[keyword] = value
        elif keyword in ("pattern", "format"):
            flat[keyword] = value
        elif (
            keyword == "multipleOf"
            and isinstance(value, int | float)
            and value >= 1
            and value % 1 == 0
        ):
            flat[keyword] = int(value)
        elif keyword in ("items", "additionalItems") and isinstance(part.schema.get("items"), list):
            _read_old_items(part, flat)
        elif keyword in ("items", "additionalProperties", "propertyNames"):
            flat[keyword] = (part.inner(keyword),)
        elif keyword == "prefixItems":
            flat[keyword] = [(part.inner(keyword, at),) for at in range(len(value))]
        elif keyword in ("properties", "patternProperties"):
            flat[keyword] = {name: (part.inner(keyword, name),) for name in value}
        elif keyword == "required":
            flat[keyword] = list(dict.fromkeys(value))
        elif keyword in NEVER_HELD or (keyword in TYPE_OF and not _asks_nothing(keyword, part)):
            flat["unheld"].append((TYPE_OF.get(keyword), keyword, part.path))
    return flat


def _read_old_items(part: Part, flat: Flat) -> None:
    """A list of ``items`` with ``additionalItems``, as before draft 2020-12."""
    flat["prefixItems"] = [(part.inner("items", at),) for at in range(len(part.schema["items"]))]
    if "additionalItems" in part.schema:
        flat["items"] = (part.inner("additionalItems"),)


def _asks_nothing(keyword: str, part: Part) -> bool:
    """Whether a keyword limits nothing, or is read elsewhere (``_dependencies``)."""
    schema = part.schema
    if keyword == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema or _asks_nothing("contains", part)
    if keyword == "additionalItems":
        return True  # without a list of items
    return keyword in (*UNEVALUATED, *DEPENDENCIES) or (keyword, schema[keyword]) == (
        "uniqueItems",
        False,
    )


def _beside(part: Part, document: Document) -> Iterator[Part]:
    """Parts that hold together with one."""
    if "$ref" in part.schema:
        yield document.referenced(part)
    for at in range(len(part.schema.get("allOf", ()))):
        yield part.inner("allOf", at)


def _dependencies(part: Part) -> Iterator[tuple[str, list[str], list[Part]]]:
    """(a name, the names it needs, the schemas of an object that has it)."""
    for keyword in DEPENDENCIES:
        for name, needed in part.schema.get(keyword, {}).items():
            if isinstance(needed, list):
                yield name, needed, []
            else:
                yield name, [], [part.inner(keyword, name)]


def _merged(one: Flat, other: Flat) -> Flat | None:
    """What is of both; None if that is nothing."""
    merged: Flat = {"unheld": [*one.get("unheld", ()), *other.get("unheld", ())]}
    for key in {**one, **other}:
        x, y = one.get(key), other.get(key)
        if key in ("unheld", "properties", "patternProperties", "prefixItems"):
            continue
        if x is None or y is None or x == y:
            merged[key] = y if x is None else x
        elif key == "type":
            merged[key] = {kind for kind in x | y if _has(x, kind) and _has(y, kind)}
            if not merged[key]:
                return None
        elif key == "enum":
            texts = {json.dumps(value) for value in y}
            merged[key] = [value for value in x if json.dumps(value) in texts]
        elif key in UPPER + LOWER:
            merged[key] = (min if key in UPPER else max)(x, y)
        elif key == "multipleOf":
            merged[key] = math.lcm(x, y)
        elif key == "required":
            merged[key] = list(dict.fromkeys([*x, *y]))
        elif key in ("items", "additionalProperties", "propertyNames"):
            merged[key] = tuple(dict.fromkeys(x + y))
        else:
            merged[key] = x
            if key in TYPE_OF:
                merged["unheld"].append((TYPE_OF[key], key, one.get("path", "#")))
    _merge_members(one, other, merged)
    return merged


def _merge_members(one: Flat, other: Flat, merged: Flat) -> None:
    """Items by their places, and properties by their names."""
    if "properties" in one or "properties" in other:
        names = {**one.get("properties", {}), **other.get("properties", {})}
        merged["properties"] = {
            name: tuple(dict.fromkeys(property_of(one, name) + property_of(other, name)))
            for name in names
        }
    if "patternProperties" in one or "patternProperties" in other:
        if all({"additionalProperties", "patternProperties"} & set(flat) for flat in (one, other)):
            merged["unheld"].append(("object", "patternProperties", one.get("path", "#")))
        merged["patternProperties"] = one.get("patternProperties") or other["patternProperties"]
    num_items = max(len(flat.get("prefixItems", ())) for flat in (one, other))
    if num_items:
        merged["prefixItems"] = [_item(one, at) + _item(other, at) for at in range(num_items)]


def property_of(flat: Flat, name: str) -> Conjunction:
    """What a flat schema asks of the property of a name."""
    patterns: Mapping[str, Conjunction] = flat.get("patternProperties", {})
    found = [flat["properties"][name]] if name in flat.get("properties", ()) else []
    found += [asked for pattern, asked in patterns.items() if is_found(pattern, name)]
    if not found:
        return tuple(flat.get("additionalProperties", ()))
    return tuple(dict.fromkeys(part for asked in found for part in asked))


def _item(flat: Flat, place: int) -> Conjunction:
    prefix = flat.get("prefixItems", ())
    return tuple(prefix[place] if place < len(prefix) else flat.get("items", ()))


def _has(types: set[str], kind: str) -> bool:
    return kind in types or (kind == "integer" and "number" in types)
