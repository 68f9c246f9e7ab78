"""A JSON schema, rewritten into one that xgrammar holds answers to.

xgrammar 0.2.8 leaves out what it does not know, and some of what it knows in certain places. The
lowered schema has no more values than the given one; it may have fewer, for instance because names
that nobody declared are not written beside declared ones. What it cannot be narrowed to is refused,
with the keyword and its path.

It has ``type`` (one), ``enum``, ``anyOf`` (with nothing beside it), the keywords of the types, and
references to ``#/$defs``; ``{}`` is any value.
"""

import decimal
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm.grammar.alternatives import TYPE_OF, TYPES, Alternatives, Conjunction, Flat, has_no_number
from dllm.grammar.objects import lowered_object
from dllm.grammar.patterns import IN_JSON, Alphabet
from dllm.grammar.references import CANNOT, Document, Part, refuse
from dllm.grammar.refusals import Unsupported
from dllm.grammar.strings import lowered_string

Schema = dict[str, Any]

NUM_DIGITS = 6  # digits behind the point in numbers that have bounds
WHY = {
    "uniqueItems": "answers cannot be held to items that differ (a set); send a list, and look for "
    "repeated items in the answer"
}
MOST_ITEMS = 1 << 20  # a larger number limits nothing: no answer is as long
MOST_MULTIPLES = 256  # values that are listed from a bound on; without bounds, the largest step


NO_MARKS = re.compile(r"\b\B")


def lower(schema: Any, alphabet: Alphabet = IN_JSON, marks: re.Pattern[str] = NO_MARKS) -> Schema:
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
    return ({"$defs": lowering.definitions} if lowering.definitions else {}) | found


class Lowering:
    """Lowers the schemas of one document; None is a schema without values.

    Attributes:
        definitions: lowered schemas that are referred to, by their names.
    """

    def __init__(self, schema: Any, alphabet: Alphabet, marks: re.Pattern[str]) -> None:
        self.alphabet, self.marks = alphabet, marks
        self.document = Document(schema)
        self.definitions: dict[str, Schema] = {}
        self.alternatives = Alternatives(self.document)
        self._names: dict[Conjunction, str] = {}
        self._empty: set[Conjunction] = set()
        self._open: dict[Conjunction, bool] = {}  # being lowered; whether something refers to it

    def conjunction(self, asked: Conjunction) -> Schema | None:
        """The lowered schema of the values of all parts."""
        asked = tuple(dict.fromkeys(asked))
        if asked in self._open:
            self._open[asked] = True
            return self._reference(asked)
        if asked in self._names and self._names[asked] in self.definitions:
            return self._reference(asked)
        if asked in self._empty:
            return None
        self._open[asked] = False
        known = set(self.definitions)
        found: list[Schema] = []
        for flat in self.alternatives.of(asked):
            found += [one for one in self.of_flat(flat, asked) if one not in found]
        is_referred_to = self._open.pop(asked)
        if not found:
            self._empty.add(asked)
            # What was lowered meanwhile may refer to it.
            self.definitions = {name: self.definitions[name] for name in known}
            return None
        lowered = found[0] if len(found) == 1 else {"anyOf": found}
        is_named = is_referred_to or any(_has_reference(part) for part in asked)
        if not is_named or lowered == {} or "$ref" in lowered:
            return lowered
        self.definitions[self._name(asked)] = lowered
        return self._reference(asked)

    def _reference(self, asked: Conjunction) -> Schema:
        return {"$ref": f"#/$defs/{self._name(asked)}"}

    def _name(self, asked: Conjunction) -> str:
        return self._names.setdefault(asked, f"r{len(self._names)}")

    def of_flat(self, flat: Flat, asked: Conjunction) -> list[Schema]:
        """One lowered schema for each type that an alternative allows.

        Args:
            asked: what its values are checked with.
        """
        if "enum" in flat:
            values = [
                value
                for value in flat["enum"]
                if all(self.document.allows(part, value) for part in asked)
            ]
            leaves = list(_leaves(values))
            if not all(map(_is_writable, leaves)):
                refuse("enum", flat["path"], "a value has no text that is read as the same value")
            texts = (leaf for leaf in leaves if isinstance(leaf, str))
            if (text := next(filter(self.marks.search, texts), None)) is not None:
                refuse("enum", flat["path"], f"the value {text[:80]!r} has a mark of calls")
            whole = [one for one in values if isinstance(one, dict | list)]
            if not self.alphabet.is_json or not whole:
                return [{"enum": values}] if values else []
            plain = [one for one in values if not isinstance(one, dict | list)]
            return [*([{"enum": plain}] if plain else []), *map(_literal, whole)]
        unheld = flat.get("unheld", ())
        spoken = {TYPE_OF[key] for key in flat if key in TYPE_OF} | {kind for kind, _, _ in unheld}
        # Whoever declares properties means an object; other keywords leave all other types alone.
        types = flat.get("type") or ({"object"} if "properties" in flat else set(TYPES))
        for kind, keyword, path in unheld:
            if kind is None or kind in types or (kind == "number" and "integer" in types):
                refuse(keyword, path, WHY.get(keyword, CANNOT))
        if types >= set(TYPES) and not spoken:
            return [{}]
        kinds = [kind for kind in (*TYPES, "integer") if kind in types]
        if "number" in types and "integer" in types:
            kinds.remove("integer")
        made = [OF_TYPE[kind](self, flat) if kind in OF_TYPE else {"type": kind} for kind in kinds]
        return [one for one in made if one is not None]


def _literal(value: Any) -> Schema:
    """The schema of one value, in any spacing."""
    if isinstance(value, dict) and value:
        members = {name: _literal(one) for name, one in value.items()}
        shape = {"type": "object", "properties": members, "required": list(value)}
        return shape | {"additionalProperties": False}
    if isinstance(value, list) and value:
        size = {"minItems": len(value), "items": False}
        return {"type": "array", "prefixItems": [_literal(one) for one in value]} | size
    if isinstance(value, dict):
        return {"type": "object", "additionalProperties": False}
    return {"type": "array", "maxItems": 0} if isinstance(value, list) else {"enum": [value]}


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


def _has_reference(part: Part) -> bool:
    return isinstance(part.schema, dict) and "$ref" in part.schema


def _number(lowering: Lowering, flat: Flat) -> Schema | None:
    if "multipleOf" in flat:
        return _integer(lowering, flat)
    if has_no_number(flat):
        return None
    low, above = (flat.get(key, -math.inf) for key in ("minimum", "exclusiveMinimum"))
    high, below = (flat.get(key, math.inf) for key in ("maximum", "exclusiveMaximum"))
    node: Schema = {"type": "number"}
    if max(low, above) > -math.inf:
        node["exclusiveMinimum" if above >= low else "minimum"] = max(low, above)
    if min(high, below) < math.inf:
        node["exclusiveMaximum" if below <= high else "maximum"] = min(high, below)
    if len(node) == 3 and not _has_digits(node):
        refuse("minimum", flat["path"], f"no number of {NUM_DIGITS} digits is between the bounds")
    return node


def _has_digits(node: Schema) -> bool:
    """Whether a number that xgrammar writes, with NUM_DIGITS behind the point, is in bounds."""
    low = decimal.Decimal(str(node["minimum"] if "minimum" in node else node["exclusiveMinimum"]))
    high = decimal.Decimal(str(node["maximum"] if "maximum" in node else node["exclusiveMaximum"]))
    step = decimal.Decimal(1).scaleb(-NUM_DIGITS)
    with decimal.localcontext(prec=400):
        first = (low / step).to_integral_value(decimal.ROUND_CEILING) * step
        if first == low and "exclusiveMinimum" in node:
            first += step
    return first < high or (first == high and "maximum" in node)


def _integer(_: Lowering, flat: Flat) -> Schema | None:
    lowest = [math.ceil(flat["minimum"])] if "minimum" in flat else []
    lowest += [math.floor(flat["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in flat else []
    highest = [math.floor(flat["maximum"])] if "maximum" in flat else []
    highest += [math.ceil(flat["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in flat else []
    bounds: Schema = {"minimum": max(lowest)} if lowest else {}
    bounds |= {"maximum": min(highest)} if highest else {}
    if lowest and highest and max(lowest) > min(highest):
        return None
    for keyword, bound in bounds.items():
        if abs(bound) >= 1 << 63:
            refuse(keyword, flat["path"], "it takes more than 64 bits")
    step = flat.get("multipleOf", 1)
    if step == 1:
        return {"type": "integer"} | bounds
    low, high = bounds.get("minimum"), bounds.get("maximum")
    if low is None and high is None and step <= MOST_MULTIPLES:
        return {"type": "integer", "multipleOf": step}
    if low is not None or high is not None:
        room = step * (MOST_MULTIPLES - 1)
        first = (high // step) * step - room if low is None else -(-low // step) * step
        values = range(first, (first + room if high is None else high) + 1, step)
        if len(values) <= MOST_MULTIPLES:
            return {"enum": list(values)} if values else None
    why = f"answers can be held to it beside one bound, or two with {MOST_MULTIPLES} values between"
    refuse("multipleOf", flat["path"], why)


def _object(lowering: Lowering, flat: Flat) -> Schema | None:
    return lowered_object(flat, lowering.conjunction, lowering.alternatives, lowering.alphabet)


def _string(lowering: Lowering, flat: Flat) -> Schema | None:
    return lowered_string(flat, lowering.alphabet)


def _array(lowering: Lowering, flat: Flat) -> Schema | None:
    fewest = math.ceil(flat.get("minItems", 0))
    has_most = flat.get("maxItems", math.inf) < MOST_ITEMS
    most = math.floor(flat["maxItems"]) if has_most else MOST_ITEMS
    prefix: list[Schema] = []
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
    if most <= 0:
        return {"type": "array", "maxItems": 0}
    node: Schema = {"type": "array"}
    if prefix:  # xgrammar writes all of them
        node["prefixItems"] = prefix
        fewest = max(fewest, len(prefix))
        if len(prefix) == most:
            return node | {"minItems": most, "items": False}
    node |= {"items": rest}
    node |= {"minItems": fewest} if fewest else {}
    return node | ({"maxItems": most} if has_most else {})


OF_TYPE: Mapping[str, Callable[[Lowering, Flat], Schema | None]] = {
    "number": _number,
    "integer": _integer,
    "string": _string,
    "array": _array,
    "object": _object,
}
