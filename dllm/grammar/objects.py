"""Objects of a lowered schema: declared names, free ones, and patterns of names.

xgrammar may write a free name twice. The last one counts, so that is no harm as long as nothing
counts names, and a free name is never a declared one.
"""

import math
from collections.abc import Callable
from typing import Any

from dllm.grammar.alternatives import TYPES, Alternatives, Conjunction, Flat, property_of
from dllm.grammar.patterns import ANYTHING, IN_JSON, Alphabet, Clause, exactly, held
from dllm.grammar.references import refuse
from dllm.grammar.strings import lowered_string

Schema = dict[str, Any]
Lower = Callable[[Conjunction], Schema | None]

MOST_NAMES = 64  # with more declared names, no free names are written beside them


def lowered_object(
    flat: Flat, lower: Lower, alternatives: Alternatives, alphabet: Alphabet
) -> Schema | None:
    """The lowered schema of an alternative's objects; None if there are none.

    Args:
        lower: the lowered schema of a conjunction.
    """
    declared, has_others = _declared(flat, alternatives)
    required = flat.get("required", [])
    properties: dict[str, Schema] = {}
    for name, asked in declared.items():
        lowered = lower(asked) if _is_name(flat, name, alternatives) else None
        if lowered is not None:
            properties[name] = lowered
        elif name in required:
            return None
    fewest, most = max(flat.get("minProperties", 0), 0), flat.get("maxProperties", math.inf)
    if max(fewest, len(required)) > most:
        return None
    node: Schema = {"type": "object"}
    node |= {"properties": properties} if properties else {}
    node |= {"required": required} if required else {}
    # Free names may come twice: where more than one is missing, declared ones have to do.
    is_enough = fewest <= len(required) + 1 or fewest > len(properties)
    others = (
        _others(flat, declared, lower, alternatives, alphabet)
        if has_others and most > len(required) and is_enough
        else None
    )
    if others is None:
        if fewest > len(properties):
            return None
        node["additionalProperties"] = False
    elif fewest > len(required) + 1:
        refuse("minProperties", flat["path"], "names that are not declared may come twice")
    else:
        node |= others
    node |= {"minProperties": math.ceil(fewest)} if fewest > len(required) else {}
    is_reached = most < len(properties) or (others is not None and most < math.inf)
    return node | ({"maxProperties": math.floor(most)} if is_reached else {})


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
    flat: Flat,
    declared: dict[str, Any],
    lower: Lower,
    alternatives: Alternatives,
    alphabet: Alphabet,
) -> Schema | None:
    """What a lowered schema says of names that are not declared; None: there are none.

    A name is of one of the patterns alone, or of none and of ``additionalProperties``.
    """
    patterns: dict[str, Conjunction] = flat.get("patternProperties", {})
    if len(declared) > MOST_NAMES or (declared and not alphabet.is_json):
        return None
    has_rest = not patterns or "additionalProperties" in flat
    rest = lower(flat.get("additionalProperties", ())) if has_rest else None
    if not patterns and not declared:
        if rest is None or "propertyNames" not in flat:
            return None if rest is None else {"additionalProperties": rest}
        return _named(flat, rest, alternatives)
    if "propertyNames" in flat and declared:
        return None
    if "propertyNames" in flat:
        refuse("patternProperties", flat["path"], "beside others answers cannot be held to it")
    asides = [Clause(exactly(declared), is_there=False)] if declared else []
    found: dict[str | None, Schema] = {}
    for pattern, asked in [*patterns.items(), (None, None)]:
        value = rest if asked is None else lower(asked)
        if value is not None:
            parts = [Clause(other, other == pattern, is_whole=False) for other in patterns]
            found[held([*parts, *asides])] = value
    return {"patternProperties": found, "additionalProperties": False} if found else None


def _named(flat: Flat, value: Schema, alternatives: Alternatives) -> Schema | None:
    """Names that ``propertyNames`` allows; each alternative is a pattern."""
    found: list[str | None] = []
    for one in alternatives.of(flat["propertyNames"]):
        for kind, keyword, path in one.get("unheld", ()):
            if kind in ("string", None):
                refuse(keyword, path)
        if "enum" in one:
            texts = [text for text in one["enum"] if isinstance(text, str)]
            texts = [text for text in texts if _is_name(flat, text, alternatives)]
            found += [held([Clause(exactly(texts))])] if texts else []
        elif "string" in one.get("type", TYPES) and (names := lowered_string(one, IN_JSON)):
            lengths = names.get("minLength", 0), names.get("maxLength", math.inf)
            found.append(names.get("pattern") or held([Clause(ANYTHING)], IN_JSON, *lengths))
    if not found:
        return None
    return {"patternProperties": dict.fromkeys(found, value), "additionalProperties": False}
