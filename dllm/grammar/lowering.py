"""A JSON schema, rewritten into one that xgrammar holds answers to.

xgrammar 0.2.8 leaves out what it does not know, and some of what it knows in certain places. The
lowered schema has no more values than the given one; it may have fewer, for instance because names
that nobody declared are not written beside declared ones. What it cannot be narrowed to is refused,
with the keyword and its path. It is made of `nodes`.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from dllm.grammar import nodes
from dllm.grammar.alternatives import (
    TYPE_OF,
    TYPES,
    Alternatives,
    Conjunction,
    Flat,
    bounds_of,
    has_no_number,
    property_of,
)
from dllm.grammar.patterns import ANYTHING, IN_JSON, Alphabet, exactly
from dllm.grammar.references import Document, canonical, refuse
from dllm.grammar.refusals import Unsupported
from dllm.grammar.strings import lowered_string

NUM_DIGITS = 6  # digits behind the point in numbers that have bounds
NO_SETS = "send a list, and look for repeated items in the answer"
MOST_NAMES = 64  # with more declared names, no free names are written beside them
MOST_ITEMS = 1 << 20  # a larger number limits nothing: no answer is as long
MOST_MULTIPLES = 256  # values that are listed from a bound on; without bounds, the largest step
MOST_INTEGER = (1 << 63) - 1  # that is written beside a bound
MOST_IN_SET = 4  # values of which a list has each at most once: all orders are written out
NO_MARKS = re.compile(r"\b\B")


def lower(
    schema: Any, alphabet: Alphabet = IN_JSON, marks: re.Pattern[str] = NO_MARKS
) -> nodes.Lowered:
    """The lowered schema of a JSON schema of draft 2020-12; older forms of items are read, too.

    Args:
        marks: where whoever reads calls would cut them; values that have one are refused.
    """
    try:
        lowering = Lowering(schema, alphabet, marks)
        found = lowering.conjunction((lowering.document.root,))
    except RecursionError:
        raise Unsupported("The schema is nested too deeply. Make it flatter.") from None
    except Unsupported:
        raise
    except Exception as error:  # whatever is in the place of a schema
        raise Unsupported(f"The schema is no valid JSON schema ({error}). Correct it.") from error
    if found is None:
        raise Unsupported("No value was found that the schema allows. Correct it.")
    return nodes.Lowered(found, lowering.definitions)


class Lowering:
    """Lowers the schemas of one document; None is a schema without values.

    Attributes:
        definitions: nodes that are referred to, by their names.
    """

    def __init__(self, schema: Any, alphabet: Alphabet, marks: re.Pattern[str]) -> None:
        self.alphabet, self.marks = alphabet, marks
        self.document = Document(schema)
        self.definitions: dict[str, nodes.Node] = {}
        self.alternatives = Alternatives(self.document)
        self._names: dict[Conjunction, str] = {}
        self._empty: set[str] = set()  # names of parts without a value
        self._open: dict[str, bool] = {}  # being lowered; whether something refers to it

    def conjunction(self, asked: Conjunction) -> nodes.Node | None:
        """The node of the values of all parts."""
        given, asked = asked, tuple(dict.fromkeys(map(self.document.meant, asked)))
        name = self._names.setdefault(asked, f"r{len(self._names)}")
        if name in self._open:
            self._open[name] = True
        if name in self._open or name in self.definitions:
            return nodes.Reference(name)
        if name in self._empty:
            return None
        self._open[name] = False
        known = set(self.definitions)
        found: list[nodes.Node] = []
        for flat in self.alternatives.of(asked):
            found += self.of_flat(flat, asked)
        is_named = self._open.pop(name) or asked != given
        if not found:
            self._empty.add(name)
            # What was lowered meanwhile may refer to it.
            self.definitions = {name: self.definitions[name] for name in known}
            return None
        found = [*{repr(one): one for one in found}.values()]  # 1 and true are not the same
        lowered = found[0] if len(found) == 1 else nodes.Choice(tuple(found))
        if not is_named or lowered == nodes.Node() or isinstance(lowered, nodes.Reference):
            return lowered
        self.definitions[name] = lowered
        return nodes.Reference(name)

    def of_flat(self, flat: Flat, asked: Conjunction) -> list[nodes.Node]:
        """One node for each type that an alternative allows; values are checked with ``asked``."""
        if "enum" in flat:
            allows = self.document.allows
            values = [one for one in flat["enum"] if all(allows(part, one) for part in asked)]
            leaves = list(_leaves(values))
            if not all(map(_is_writable, leaves)):
                refuse("enum", flat["path"], "a value has no text that is read as the same value")
            texts = (leaf for leaf in leaves if isinstance(leaf, str))
            if (text := next(filter(self.marks.search, texts), None)) is not None:
                refuse("enum", flat["path"], f"the value {text[:80]!r} has a mark of calls")
            plain = tuple(one for one in values if not isinstance(one, dict | list))
            whole = [_literal(one) for one in values if isinstance(one, dict | list)]
            return [nodes.Values(plain), *whole] if plain else whole
        unheld = flat.get("unheld", ())
        spoken = {TYPE_OF[key] for key in flat if key in TYPE_OF} | {kind for kind, _, _ in unheld}
        # Whoever declares properties means an object; other keywords leave all other types alone.
        types = flat.get("type") or ({"object"} if "properties" in flat else set(TYPES))
        for kind, keyword, path in unheld:
            if kind is None or kind in types or (kind == "number" and "integer" in types):
                refuse(keyword, path)
        if types >= set(TYPES) and not spoken:
            return [nodes.Node()]
        kinds = [kind for kind in (*TYPES, "integer") if kind in types]
        if "number" in types and "integer" in types:
            kinds.remove("integer")
        return [one for kind in kinds if (one := OF_TYPE[kind](self, flat)) is not None]


def _literal(value: Any) -> nodes.Node:
    """One value, in any spacing."""
    if isinstance(value, dict):
        return nodes.Members({name: _literal(one) for name, one in value.items()}, tuple(value))
    if isinstance(value, list):
        return _all_of(map(_literal, value))
    return nodes.Values((value,))


def _all_of(items: Iterable[nodes.Node]) -> nodes.Items:
    """Arrays of just these items."""
    prefix = tuple(items)
    return nodes.Items(prefix, False, len(prefix) or None, None if prefix else 0)


def _leaves(value: Any) -> Iterator[Any]:
    """Names and values without members."""
    if isinstance(value, dict):
        value = [one for pair in value.items() for one in pair]
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _is_writable(value: Any) -> bool:
    """Whether xgrammar writes a value as it is: integers of 64 bits, and texts in UTF-8."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or math.isfinite(value)


def _number(lowering: Lowering, flat: Flat) -> nodes.Node | None:
    if "multipleOf" in flat:
        return _integer(lowering, flat)
    if has_no_number(flat):
        return None
    low, high, is_above, is_below = bounds_of(flat)
    first, last = _whole(flat, 10**NUM_DIGITS)
    if first > last:
        refuse("minimum", flat["path"], f"no number of {NUM_DIGITS} digits is between the bounds")
    least, most = low if low > -math.inf else None, high if high < math.inf else None
    lower_bounds = (None, least) if is_above else (least, None)
    return nodes.Number("number", *lower_bounds, *((None, most) if is_below else (most, None)))


def _whole(flat: Flat, scale: int = 1) -> tuple[float, float]:
    """The least and the largest integer among an alternative's numbers times ``scale``."""
    low, high, is_above, is_below = bounds_of(flat)
    if low > -math.inf:
        least = Fraction(str(low)) * scale
        low = math.floor(least) + 1 if is_above else math.ceil(least)
    if high < math.inf:
        most = Fraction(str(high)) * scale
        high = math.ceil(most) - 1 if is_below else math.floor(most)
    return low, high


def _integer(_: Lowering, flat: Flat) -> nodes.Node | None:
    low, high = _whole(flat)
    if low > high:
        return None
    if MOST_INTEGER < low < math.inf or -math.inf < high < -MOST_INTEGER:
        refuse("minimum" if low > 0 else "maximum", flat["path"], "it takes more than 64 bits")
    low = max(low, -MOST_INTEGER) if low > -math.inf else low
    high = min(high, MOST_INTEGER) if high < math.inf else high
    step = flat.get("multipleOf", 1)
    if step == 1:
        bounds = low if low > -math.inf else None, high if high < math.inf else None
        return nodes.Number("integer", bounds[0], None, bounds[1])
    if (low, high) != (-math.inf, math.inf):
        room = step * (MOST_MULTIPLES - 1)
        first = int(-(-low // step) * step if low > -math.inf else (high // step) * step - room)
        values = range(first, int(high if high < math.inf else first + room) + 1, step)
        if len(values) <= MOST_MULTIPLES:
            return nodes.Values(tuple(values)) if values else None
    elif step <= MOST_MULTIPLES:
        return nodes.Number("integer", multiple_of=step)
    why = f"answers can be held to it beside one bound, or two with {MOST_MULTIPLES} values between"
    refuse("multipleOf", flat["path"], why)


def _array(lowering: Lowering, flat: Flat) -> nodes.Node | None:
    fewest = math.ceil(flat.get("minItems", 0))
    has_most = flat.get("maxItems", math.inf) < MOST_ITEMS
    most = math.floor(flat["maxItems"]) if has_most else MOST_ITEMS
    prefix: list[nodes.Node] = []
    rest = lowering.conjunction(flat.get("items", ())) if most > 0 else None
    for asked in flat.get("prefixItems", ())[: max(most, 0)]:
        item = lowering.conjunction(asked)
        if item is None:
            rest = None
            break
        prefix.append(item)
    if rest is None:
        most = min(most, len(prefix))
    if fewest > most:
        return None
    if flat.get("uniqueItems") is True and most > 1:
        item = lowering.definitions.get(rest.name) if isinstance(rest, nodes.Reference) else rest
        values = item.enum if isinstance(item, nodes.Values) else ()
        differ = [nodes.Values((one,)) for one in {canonical(one): one for one in values}.values()]
        if prefix or not differ or not fewest <= len(differ) <= MOST_IN_SET:
            refuse("uniqueItems", flat["path"], NO_SETS)
        sizes = range(fewest, min(most, len(differ)) + 1)
        orders = (one for size in sizes for one in itertools.permutations(differ, size))
        return nodes.Choice(tuple(map(_all_of, orders)))
    if rest is None or len(prefix) >= most:
        return _all_of(prefix)
    fewest = max(fewest, len(prefix))  # xgrammar writes all of them
    return nodes.Items(tuple(prefix), rest, fewest or None, most if has_most else None)


def _object(lowering: Lowering, flat: Flat) -> nodes.Node | None:
    """The node of an alternative's objects; None if there are none.

    xgrammar may write a free name twice. The last one counts, so that is no harm as long as nothing
    counts names, and a free name is never a declared one.
    """
    alternatives = lowering.alternatives
    declared, has_others = _declared(flat, alternatives)
    required = flat.get("required", [])
    properties: dict[str, nodes.Node] = {}
    for name, asked in declared.items():
        lowered = lowering.conjunction(asked) if _is_name(flat, name, alternatives) else None
        if lowered is not None:
            properties[name] = lowered
        elif name in required:
            return None
    fewest, most = max(flat.get("minProperties", 0), 0), flat.get("maxProperties", math.inf)
    if max(fewest, len(required)) > most:
        return None
    # Free names may come twice: where more than one is missing, declared ones have to do.
    is_enough = fewest <= len(required) + 1 or fewest > len(properties)
    others, patterns = (
        _others(lowering, flat, declared)
        if has_others and most > len(required) and is_enough
        else (None, {})
    )
    is_open = others is not None or bool(patterns)
    if not is_open and fewest > len(properties):
        return None
    if is_open and fewest > len(required) + 1:
        refuse("minProperties", flat["path"], "names that are not declared may come twice")
    least = math.ceil(fewest) if fewest > len(required) else None
    is_reached = most < math.inf and (is_open or most < len(properties))
    limit = math.floor(most) if is_reached else None
    return nodes.Members(properties, tuple(required), others or False, patterns, least, limit)


def _declared(flat: Flat, alternatives: Alternatives) -> tuple[dict[str, Conjunction], bool]:
    """The properties that are written by their names, and whether there may be others.

    Beside declared names there are others only if the schema says of which value.
    """
    names = dict.fromkeys([*flat.get("properties", ()), *flat.get("required", ())])
    named = [part for asked in flat.get("properties", {}).values() for part in asked]
    is_named = any(part.schema is not False for part in named) or bool(flat.get("required"))
    has_others = not is_named or not {"additionalProperties", "patternProperties"}.isdisjoint(flat)
    if "propertyNames" in flat:
        listed = alternatives.of(flat["propertyNames"])
        if all("enum" in one for one in listed):
            values = [value for one in listed for value in one["enum"] if isinstance(value, str)]
            names |= dict.fromkeys(values)
            has_others = False
    return {name: property_of(flat, name) for name in names}, has_others


def _is_name(flat: Flat, name: str, alternatives: Alternatives) -> bool:
    asked: Conjunction = flat.get("propertyNames", ())
    return all(alternatives.document.allows(part, name) for part in asked)


def _others(
    lowering: Lowering, flat: Flat, declared: Mapping[str, Conjunction]
) -> tuple[nodes.Node | None, Mapping[str, nodes.Node]]:
    """The values of names that are not declared.

    A name is of one of the patterns alone, or of none and of ``additionalProperties``.
    """
    patterns: dict[str, Conjunction] = flat.get("patternProperties", {})
    if len(declared) > MOST_NAMES or (declared and not lowering.alphabet.is_json):
        return None, {}
    asked: list[tuple[str | None, Conjunction]] = [*patterns.items()]
    if not patterns or "additionalProperties" in flat:
        asked.append((None, flat.get("additionalProperties", ())))
    values = {pattern: lowering.conjunction(own) for pattern, own in asked}
    if not (patterns or declared or "propertyNames" in flat):
        return values[None], {}
    asides = [(exactly(declared), False)] if declared else []
    found: dict[str, nodes.Node] = {}
    for pattern, value in values.items():
        if value is not None:
            parts = [*((other, other == pattern) for other in patterns), *asides]
            found |= dict.fromkeys(_named(flat, lowering.alternatives, parts), value)
    return None, found


def _named(flat: Flat, alternatives: Alternatives, parts: list[tuple[str, bool]]) -> list[str]:
    """Names that ``propertyNames`` allows and in which patterns are found or not; as patterns."""
    found: list[str] = []
    for one in alternatives.of(flat.get("propertyNames", ())):
        for kind, keyword, path in one.get("unheld", ()):
            if kind in ("string", None):
                refuse(keyword, path)
        if "enum" in one:
            names = [name for name in one["enum"] if isinstance(name, str)]
            texts = [name for name in names if _is_name(flat, name, alternatives)]
            one = {"path": one["path"], "pattern": ((exactly(texts), True),)}
        one = one | {"pattern": (*one.get("pattern", ()), *parts) or ((ANYTHING, True),)}
        if "string" in one.get("type", TYPES):
            named = lowered_string(one, IN_JSON, is_whole=not parts)
            found += [named.pattern] if named and named.pattern else []
    return found


OF_TYPE: Mapping[str, Callable[[Lowering, Flat], nodes.Node | None]] = {
    "number": _number,
    "integer": _integer,
    "string": lambda lowering, flat: lowered_string(flat, lowering.alphabet),
    "array": _array,
    "object": _object,
    "boolean": lambda *_: nodes.Values((False, True)),
    "null": lambda *_: nodes.Values((None,)),
}
