"""The texts of grammars as xgrammar gets them: schemas lowered, patterns spelled."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dllm.grammar.gemma_arguments import QUOTE, UNREAD, Writer
from dllm.grammar.lowering import NO_MARKS, lower
from dllm.grammar.pattern_edges import held
from dllm.grammar.patterns import IN_GEMMA, TEXT, Clause, refusal
from dllm.grammar.refusals import Unsupported

# Where a structural tag has texts, in either of xgrammar's forms, and where it has schemas.
SPOKEN = ("begin", "end", "triggers", "value", "separator", "pattern", "grammar")
SCHEMAS = ("json_schema", "schema")
MARK = re.compile(r"<[^<>\s]+>")  # of calls and thoughts, as <tool_call> and <|tool_call_begin|>


def lower_text(kind: str, text: str) -> str:
    """The text of a grammar (`compile.Spec`), its schemas lowered and its patterns spelled."""
    if kind == "regex":
        return _spelled(text)
    if kind not in ("json", "structural_tag"):
        return text
    given = read_json(text)
    if kind == "json":
        return json.dumps(lower(given).schema())
    marks = "|".join(map(re.escape, MARK.findall("\n".join(spoken(given)))))
    return json.dumps(_lower_tag(given, re.compile(marks) if marks else NO_MARKS))


def read_json(text: str) -> Any:
    """What the text of a schema or a structural tag says."""
    try:
        return json.loads(text, parse_constant=int)  # which reads no NaN
    except (ValueError, RecursionError) as error:
        raise Unsupported("The grammar is no valid JSON. Correct it.") from error


def spoken(tag: Any, key: str = "") -> Iterator[str]:
    """The texts that a structural tag writes into answers, without its names and descriptions."""
    if isinstance(tag, str) and key in SPOKEN:
        yield QUOTE if tag.startswith(UNREAD) else tag
    elif isinstance(tag, list):
        for one in tag:
            yield from spoken(one, key)
    elif isinstance(tag, Mapping):
        for name, value in tag.items():
            if name not in SCHEMAS:
                yield from spoken(value, name)


def _lower_tag(tag: Any, marks: re.Pattern[str]) -> Any:
    if isinstance(tag, list):
        return [_lower_tag(one, marks) for one in tag]
    if not isinstance(tag, Mapping):
        return tag
    if str(tag.get("value", "")).startswith(UNREAD):
        return {"type": "grammar", "grammar": _gemma_arguments(tag["value"].removeprefix(UNREAD))}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        return {"type": "const_string", "value": _spelled(tag["pattern"])}
    return {
        key: lower(value, marks=marks).schema() if key in SCHEMAS else _lower_tag(value, marks)
        for key, value in tag.items()
    }


def _gemma_arguments(written: str) -> str:
    tool, schema = read_json(written)
    try:
        return Writer(lower(schema, IN_GEMMA)).grammar
    except Unsupported as reason:
        raise Unsupported(f"The tool {tool[:40]!r}: {reason}") from reason


def _spelled(pattern: str) -> str:
    """What `rules` reads as a pattern, where xgrammar writes a text as it is."""
    found = held([Clause(pattern)], TEXT)
    if found is None:
        raise refusal(pattern, "has no text")
    return found
