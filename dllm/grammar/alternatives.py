"""A JSON schema as alternatives without references, ``allOf``, ``anyOf`` and ``oneOf``.

An alternative is a flat schema, a dict: a value is of the schema if it is of one of them. In it
``type`` is a set, ``enum`` a list, and each schema inside is a *conjunction*, a tuple of parts all
of which hold. Three of its keys are ours:

    path      where it stands
    unheld    what answers cannot be held to: (type that it speaks of, keyword, path). It is refused
              only where the alternative allows that type.
    is_complement  properties in it are of a schema that does not hold: they are not evaluated
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm.grammar.pattern_edges import have_none
from dllm.grammar.patterns import Clause, exactly, is_found
from dllm.grammar.references import Document, Part, canonical, refuse

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
# Keywords that belong to no type, and that answers are never held to.
NEVER_HELD = ("$dynamicRef", "$recursiveRef")
# What a value breaks that is beyond a bound: the bound that it keeps to, and by how much more.
BEYOND = {
    "minimum": ("exclusiveMaximum", 0),
    "maximum": ("exclusiveMinimum", 0),
    "exclusiveMinimum": ("maximum", 0),
    "exclusiveMaximum": ("minimum", 0),
    **{f"min{size}": (f"max{size}", -1) for size in ("Length", "Items", "Properties")},
    **{f"max{size}": (f"min{size}", 1) for size in ("Length", "Items", "Properties")},
}
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
MOST_ALTERNATIVES = 64
DEEPEST = 64  # references, and alternatives of alternatives, one inside the other


class Alternatives:
    """The alternatives of the schemas in one document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._negations: dict[int, Part] = {}
        self._empty: dict[frozenset[Part], bool] = {}

    def of(self, conjunction: Conjunction, is_exact: bool = True) -> list[Flat]:
        """Alternatives of the values that are of all parts.

        Unless ``is_exact``, ``oneOf`` is read as ``anyOf``: they may have other values, too.
        """
        found: list[Flat] = [{"path": conjunction[0].path if conjunction else "#"}]
        for part in conjunction:
            found = self._product(found, self._of_part(part, (), is_exact), part)
        return found

    def _of_part(self, part: Part, opened: tuple[Part, ...], is_exact: bool) -> list[Flat]:
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
            found = self._product(found, self._of_part(other, opened, is_exact), part)
        for keyword in ("anyOf", "oneOf"):
            inner = [part.inner(keyword, at) for at in range(len(schema.get(keyword, ())))]
            each = [self._of_part(one, opened, is_exact) for one in inner]
            if keyword == "oneOf" and is_exact:
                given = [self._of_part(one, opened, False) for one in inner]
                if all("type" in flat for flat in found):  # of others it does not matter
                    kinds = [{"type": set().union(*(flat["type"] for flat in found))}]
                    each, given = (
                        [self._product(kinds, one, part) for one in ones] for ones in (each, given)
                    )
                each = [self._set_apart(at, each, given, inner) for at in range(len(inner))]
            if keyword in schema:
                found = self._product(found, [flat for one in each for flat in one], part)
        for name, needed, then in _dependencies(part):
            absent: Flat = {"properties": {name: (Part(False, part.path, part.resolver),)}}
            present = [{"required": needed}]
            for other in then:
                present = self._product(present, self._of_part(other, opened, is_exact), part)
            done = [one for one in found if any(_is_within(one, it) for it in (absent, *present))]
            named = self._product([{"required": [name]}], present, part)
            others = [one for one in found if one not in done]
            found = done + self._product(others, [absent, *named], part)
        for others in self._conditions(part, opened, is_exact) if is_exact else ():
            found = self._product(found, others, part)
        # These keywords are about members that no other schema in this place speaks of.
        for keyword, known in UNEVALUATED.items():
            if keyword in schema:
                if any("is_complement" in flat for flat in found):
                    refuse(keyword, part.path, "beside 'not' or 'if' answers cannot be held to it")
                found = [{known: (part.inner(keyword),)} | flat for flat in found]
        return found

    def _conditions(
        self, part: Part, opened: tuple[Part, ...], is_exact: bool
    ) -> Iterator[list[Flat]]:
        """The alternatives that ``not`` and ``if`` leave."""
        schema = part.schema
        if "not" in schema:
            yield self._sure_complement(part.inner("not"), "not", part)
        if "if" in schema and {"then", "else"} & set(schema):
            condition = part.inner("if")
            holds = self._of_part(condition, opened, is_exact)
            fails = self._sure_complement(condition, "if", part)
            if "then" in schema:
                then = self._of_part(part.inner("then"), opened, is_exact)
                holds = self._product(holds, then, part)
            if "else" in schema:
                other = self._of_part(part.inner("else"), opened, is_exact)
                fails = self._product(fails, other, part)
            yield holds + fails

    def _sure_complement(self, part: Part, keyword: str, at: Part) -> list[Flat]:
        found = self._complement(part, ())
        if not found and part.schema is not True and part.schema != {}:
            refuse(keyword, at.path)
        return found

    def _complement(self, part: Part, opened: tuple[Part, ...]) -> list[Flat]:
        """Alternatives of values that are not of a part; there may be others."""
        schema = part.schema
        if isinstance(schema, bool):
            return [] if schema else [{"path": part.path}]
        if part in opened or len(opened) > DEEPEST:
            return []
        opened += (part,)
        found = self._other_kinds(part)
        for name in schema.get("properties", ()):
            if self._complement(part.inner("properties", name), opened):
                never = (self._negated(part.inner("properties", name)),)
                found.append({"type": {"object"}, "required": [name], "properties": {name: never}})
        for name in schema.get("required", ()):
            never = (Part(False, part.path, part.resolver),)
            found.append({"type": {"object"}, "properties": {name: never}})
        for other in _beside(part, self.document):
            found += self._complement(other, opened)
        if "anyOf" in schema:
            none: list[Flat] = [{}]
            for at in range(len(schema["anyOf"])):
                inner = self._complement(part.inner("anyOf", at), opened)
                none = self._product(none, inner, part)
            found += none
        if "not" in schema:
            found += self._of_part(part.inner("not"), opened, True)
        return [{"path": part.path, "is_complement": True} | flat for flat in found]

    def _negated(self, part: Part) -> Part:
        """The schema of all values that are not of a part; the same one each time."""
        key = id(part.schema)
        if key not in self._negations:
            self._negations[key] = Part({"not": part.schema}, part.path, part.resolver)
        return self._negations[key]

    def _other_kinds(self, part: Part) -> list[Flat]:
        """Values of another type than a part has, or beyond one of its bounds, or no ``const``."""
        schema, found = part.schema, []
        flat = _flat(Part({key: schema[key] for key in schema if key in ("type", *BEYOND)}, "#", 0))
        if "type" in flat:
            given = {"number"} if "integer" in flat["type"] else set()
            found.append({"type": set(TYPES) - flat["type"] - given})
        for keyword, (other, step) in BEYOND.items():
            is_broken = keyword in flat and (step != -1 or flat[keyword] > 0)  # by any value
            if is_broken:
                found.append({"type": {TYPE_OF[keyword]}, other: flat[keyword] + step})
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            kinds = {_kind(value) for value in values}
            if kinds < set(TYPES):
                found.append({"type": set(TYPES) - kinds})
            if "boolean" in kinds:
                found.append({"enum": [one for one in (True, False) if one not in values]})
            texts = [value for value in values if isinstance(value, str)]
            if texts:
                found.append({"type": {"string"}, "pattern": ((exactly(texts), False),)})
        if "pattern" in schema:
            found.append({"type": {"string"}, "pattern": ((schema["pattern"], False),)})
        return [one for one in found if one.get("type") != set() and one.get("enum") != []]

    def _values(self, part: Part) -> list[Flat]:
        """The values of ``const`` or ``enum`` that the rest of a part allows, as alternatives."""
        given = part.schema.get("enum", [part.schema.get("const")])
        if not isinstance(given, list):
            refuse("enum", part.path, "it is no list")
        rest = {key: value for key, value in part.schema.items() if key != "enum"}
        beside = Part(rest, part.path, part.resolver)
        values = [value for value in given if self.document.allows(beside, value)]
        return [{"enum": values, "path": part.path}] if values else []

    def _product(self, left: list[Flat], right: list[Flat], part: Part) -> list[Flat]:
        merged = (_merged(one, other) for one in left for other in right)
        found = [flat for flat in merged if flat is not None]
        if len(found) > MOST_ALTERNATIVES:
            found = self._different(found)
        if len(found) > MOST_ALTERNATIVES:
            refuse("anyOf", part.path, f"it comes to more than {MOST_ALTERNATIVES} alternatives")
        return found

    def _different(self, flats: list[Flat]) -> list[Flat]:
        """Those that have values, equal ones once."""
        found: dict[str, Flat] = {}
        for flat in flats:
            if not self._is_empty(flat):
                sense = canonical({key: value for key, value in flat.items() if key != "path"})
                found.setdefault(sense, flat)
        return list(found.values())

    def _set_apart(
        self, at: int, sure: list[list[Flat]], given: list[list[Flat]], parts: list[Part]
    ) -> list[Flat]:
        """Those of a part of ``oneOf`` without others' values; ``given`` may have more than it."""
        # As when they are lowered: whoever declares properties means an object.
        flats = [{"type": {"object"}} | one if "properties" in one else one for one in sure[at]]
        for place, others in enumerate(given):
            if place != at:
                flats = [one for one in flats if not any(_is_within(one, o) for o in sure[place])]
                for other in others:
                    each = [self._without(flat, parts[at], other, parts[place]) for flat in flats]
                    flats = [one for ones in each for one in ones]
        return [flat for flat in flats if flat.get("enum") != []]

    def _without(self, flat: Flat, part: Part, other: Flat, other_part: Part) -> list[Flat]:
        """An alternative without the values of another, which is of ``other_part``."""
        allows = self.document.allows
        if "enum" in flat:
            return [flat | {"enum": [one for one in flat["enum"] if not allows(other_part, one)]}]
        if "enum" in other and not any(allows(part, value) for value in other["enum"]):
            return [flat]
        both = _merged(flat, other)
        if both is None or self._is_empty(both):
            return [flat]
        items = (*_item(flat, 0), *_item(other, 0))
        if both.get("type") == {"array"} and self._have_none(items):  # both have the empty list
            return [flat | {"minItems": max(flat.get("minItems", 0), 1)}]
        types = both.get("type", {TYPE_OF[key] for key in both if key in TYPE_OF})
        if types == {"object"}:
            flat = flat | {"type": {"object"}}
            ours = flat.get("properties", {})
            for name in ours:
                is_ever = not self._have_none(ours[name])
                if is_ever and self._have_none((*ours[name], *property_of(other, name))):
                    return [flat | {"required": [*flat.get("required", ()), name]}]
            for name in other.get("required", ()):
                if name not in flat.get("required", ()):
                    never = Part(False, other_part.path, other_part.resolver)
                    return [flat | {"properties": {**ours, name: (never,)}}]
        found = self._product([flat], self._complement(other_part, ()), part)
        found = [one for one in found if not self._is_empty(one)]
        if not found:
            refuse("oneOf", part.path, "two of its schemas may hold for one value; write 'anyOf'")
        return found

    def _have_none(self, conjunction: Conjunction) -> bool:
        key = frozenset(conjunction)
        if key not in self._empty:
            self._empty[key] = False  # as far as it is known where it leads back to itself
            flats = self.of(tuple(dict.fromkeys(conjunction)), is_exact=False)
            self._empty[key] = all(self._is_empty(flat, conjunction) for flat in flats)
        return self._empty[key]

    def _is_empty(self, flat: Flat, conjunction: Conjunction = ()) -> bool:
        """Whether it is sure that an alternative has no value that is of all parts, too."""
        if "enum" in flat:
            allows = self.document.allows
            return not any(all(allows(part, one) for part in conjunction) for one in flat["enum"])
        types = flat.get("type", set(TYPES))
        return all(kind in HAS_NONE and HAS_NONE[kind](flat) for kind in types) or (
            types == {"object"}
            and any(self._have_none(property_of(flat, name)) for name in flat.get("required", ()))
        )


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def bounds_of(flat: Flat) -> tuple[float, float, bool, bool]:
    """(low, high, whether a number has to be above ``low``, and below ``high``)."""
    low, above = (flat.get(key, -math.inf) for key in ("minimum", "exclusiveMinimum"))
    high, below = (flat.get(key, math.inf) for key in ("maximum", "exclusiveMaximum"))
    is_above, is_below = low <= above > -math.inf, high >= below < math.inf
    return max(low, above), min(high, below), is_above, is_below


def has_no_number(flat: Flat) -> bool:
    """Whether no number is between the bounds of an alternative."""
    low, high, is_above, is_below = bounds_of(flat)
    return low > high or (low == high and (is_above or is_below))


def _has_no_size(fewest: str, most: str) -> Callable[[Flat], bool]:
    return lambda flat: flat.get(fewest, 0) > flat.get(most, math.inf)


def has_no_text(flat: Flat) -> bool:
    """Whether it is sure that no text is of an alternative."""
    fewest, most = flat.get("minLength", 0), flat.get("maxLength", math.inf)
    parts = tuple(Clause(one, is_there, False) for one, is_there in flat.get("pattern", ()))
    return fewest > most or (bool(parts) and have_none(parts, fewest, most))


# By type, whether its bounds contradict each other, so that it has no value.
HAS_NONE: Mapping[str, Callable[[Flat], bool]] = {
    "number": has_no_number,
    "integer": has_no_number,
    "string": has_no_text,
    "array": _has_no_size("minItems", "maxItems"),
    "object": _has_no_size("minProperties", "maxProperties"),
}


def _flat(part: Part) -> Flat:
    """The keywords of one part that are not alternatives."""
    flat: Flat = {"path": part.path, "unheld": []}
    for keyword, value in part.schema.items():
        if keyword == "type":
            named = value if isinstance(value, list) and value else [value]
            if unknown := [one for one in named if one not in (*TYPES, "integer")]:
                known = ", ".join((*TYPES, "integer"))
                refuse("type", part.path, f"{json.dumps(unknown[0])} is no type; allowed: {known}")
            flat["type"] = set(named)
        elif keyword in UPPER + LOWER:
            if (bound := _bound(part, keyword)) is not None:
                flat[keyword] = bound
        elif keyword == "pattern":
            flat[keyword] = ((value, True),)  # or not found
        elif keyword in ("format", "uniqueItems"):
            flat[keyword] = value
        elif keyword == "multipleOf" and _is_whole(value):
            flat[keyword] = int(value)
        elif keyword == "additionalItems":  # beside a list of items, before draft 2020-12
            if isinstance(part.schema.get("items"), list):
                flat["items"] = (part.inner(keyword),)
        elif keyword == "prefixItems" or (keyword == "items" and isinstance(value, list)):
            flat["prefixItems"] = [(part.inner(keyword, at),) for at in range(len(value))]
        elif keyword in ("items", "additionalProperties", "propertyNames"):
            flat[keyword] = (part.inner(keyword),)
        elif keyword in ("properties", "patternProperties"):
            flat[keyword] = {name: (part.inner(keyword, name),) for name in value}
        elif keyword == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                refuse(keyword, part.path, "it is no list of names")
            flat[keyword] = list(dict.fromkeys(value))
        elif keyword in NEVER_HELD or (keyword in TYPE_OF and not _asks_nothing(keyword, part)):
            flat["unheld"].append((TYPE_OF.get(keyword), keyword, part.path))
    return flat


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 1 and value % 1 == 0


def _bound(part: Part, keyword: str) -> float | None:
    value = part.schema[keyword]
    if isinstance(value, bool) and keyword.startswith("exclusive"):  # as in draft 4
        value = part.schema.get(keyword.removeprefix("exclusive").lower()) if value else None
        if value is None:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(keyword, part.path, "it is no number")
    return value


def _asks_nothing(keyword: str, part: Part) -> bool:
    """Whether a keyword limits nothing, or is read elsewhere (``_dependencies``)."""
    schema = part.schema
    if keyword == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema or _asks_nothing("contains", part)
    return keyword in UNEVALUATED or keyword in DEPENDENCIES


def _beside(part: Part, document: Document) -> Iterator[Part]:
    """Parts whose values a value of ``part`` has to be one of as well."""
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
    """The values of both; None if there are none."""
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
            texts = {canonical(value) for value in y}
            merged[key] = [value for value in x if canonical(value) in texts]
        elif key in UPPER + LOWER:
            merged[key] = (min if key in UPPER else max)(x, y)
        elif key == "multipleOf":
            merged[key] = math.lcm(x, y)
        elif key == "required":
            merged[key] = list(dict.fromkeys([*x, *y]))
        elif key in ("items", "additionalProperties", "propertyNames", "pattern"):
            merged[key] = tuple(dict.fromkeys(x + y))
        else:
            merged[key] = x
            if key in TYPE_OF:
                merged["unheld"].append((TYPE_OF[key], key, one.get("path", "#")))
    _merge_members(one, other, merged)
    return merged


def _is_within(one: Flat, other: Flat) -> bool:
    """Whether it is sure that all values of an alternative are of another, too."""
    both = _merged(one, other) or {}
    kinds = {None, "number", *one.get("type", TYPES)}
    keys = [key for key in one | both if TYPE_OF.get(key) in kinds]
    return all(one.get(key) == both.get(key) for key in keys)


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
    """What the value of a property has to satisfy: all of the returned schemas.

    additionalProperties is for names that neither properties nor a pattern has (JSON Schema).
    """
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
