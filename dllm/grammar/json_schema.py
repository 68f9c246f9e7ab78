"""Refuses JSON schemas that ask for more than xgrammar holds answers to.

xgrammar 0.2.8 leaves out what it does not know, and vLLM refuses only a part of that. What is left
out would make an answer wrong without a word.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm.grammar.patterns import check_pattern
from dllm.grammar.rules import Unsupported

# Ignored by xgrammar.
NEVER_HELD = (
    *("if", "then", "else", "not", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
)
# Beside one of these, xgrammar ignores everything that is no note; a type is held to beside values.
COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
VALUES = ("enum", "const")
NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "$comment", "discriminator", "nullable"),
}
# Values that are not schemas, though they may look like one.
DATA = ("enum", "const", "default", "examples", "example")


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema that the answer would not be held to.

    Raises:
        Unsupported: the message names the keyword.
    """
    for part in parts(schema):
        for key in NEVER_HELD:
            if key in part:
                raise refusal(key, "answers cannot be held to it")
        given = [key for key in COMBINING if key in part]
        notes = NOTES | {"type"} if set(given) <= set(VALUES) else NOTES
        beside = sorted(set(part) - notes - set(given))
        if given and (beside or len(given) > 1):
            other = beside[0] if beside else given[1]
            raise refusal(other, f"beside {given[0]!r} answers cannot be held to it")
        if isinstance(part.get("pattern"), str):
            check_pattern(part["pattern"])
        if isinstance(part.get("patternProperties"), Mapping):
            for pattern in part["patternProperties"]:
                check_pattern(pattern)


def check_text(
    kind: str, text: str, more: Callable[[str, Any], None] = lambda kind, schema: None
) -> None:
    """As ``check_schema``, for the text of a grammar of any kind (``compile.Spec``).

    Args:
        more: is called before, with the kind and each JSON schema in the text.

    Raises:
        Unsupported: a schema or pattern is refused, or the text is no JSON.
    """

    def check(schema: Any) -> None:
        more(kind, schema)
        check_schema(schema)

    if kind == "regex":
        check_pattern(text)
    if kind not in ("json", "structural_tag"):
        return
    try:
        read = json.loads(text)
        if kind == "json":
            check(read)
        else:
            _check_tag(read, check)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Unsupported):
            raise
        raise Unsupported("The grammar is no valid JSON. Correct it.") from error


def refusal(key: str, why: str) -> Unsupported:
    """What names a keyword of a schema."""
    return Unsupported(f"The schema uses {key!r}: {why}. Leave it out.")


def parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema, and all schemas in it; values that look like schemas are none (``DATA``)."""
    if isinstance(schema, list):
        for one in schema:
            yield from parts(one)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in DATA:
            continue
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            # The keys in there are names.
            for one in value.values() if isinstance(value, Mapping) else ():
                yield from parts(one)
        else:
            yield from parts(value)


def _check_tag(tag: Any, check: Callable[[Any], None]) -> None:
    """Check the schemas and patterns in a structural tag, of either of xgrammar's forms."""
    if isinstance(tag, list):
        for one in tag:
            _check_tag(one, check)
    if isinstance(tag, Mapping):
        if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
            check_pattern(tag["pattern"])
        for key, value in tag.items():
            if key in ("json_schema", "schema"):
                check(value)
            else:
                _check_tag(value, check)
