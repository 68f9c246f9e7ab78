"""Tables of options in our pages, from the models that check them (``dllm.settings``)."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from bench.tables import markdown

TYPES = {"string": "a text", "boolean": "a flag", "array": "a list", "object": "an object"}


def table(kind: type) -> str:
    """A row for each field: what is allowed, its default, and its docstring."""
    fields = TypeAdapter(kind).json_schema()["properties"]
    lines = [
        [
            f"`{name}`",
            allowed(one),
            "-" if one.get("default") in (None, []) else f"`{str(one['default']).lower()}`",
            " ".join(one["description"].split()),
        ]
        for name, one in fields.items()
    ]
    return markdown(["option", "allowed", "default", "meaning"], lines)


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema of a field allows, in words; null is its default."""
    if "anyOf" in schema:
        return " or ".join(allowed(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema["type"] in TYPES:
        return TYPES[schema["type"]]
    above, low, high = (schema.get(k) for k in ("exclusiveMinimum", "minimum", "maximum"))
    least = f"{low:g}" if above is None else f"above {above:g}"
    return f"at least {least}" if high is None else f"{least} to {high:,g}"
