"""Refuses a wrong body at its first wrong item, and long lists before they are read to their end.

vLLM's request models collect every error of a body. A list of 20,000 empty objects as the input of
``/v1/responses`` (60 kB) comes to 4.7 million errors, which take 44 s of the event loop and 17 GB.
And every item of a long list costs time, even if all of them are right.

So the validators themselves are replaced: what runs before or beside them (a middleware, a
dependency of FastAPI) would have to find the first error of a body by validating it once more.
"""

from itertools import chain
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, core_schema

# The most items of a list of objects in a body, and the most names of an object whose names are
# known. An item of a response's input takes 70 us.
LONGEST = 1024
LONGEST_OF_FIELD = {"messages": 4096, "input": 512}
# The most parts of the contents of all messages together. A part takes 13 us.
MOST_PARTS = 4096
# Lists of these types are not bounded here: they are read fast, and have bounds of their own.
PLAIN = {"int", "float", "str", "bool"}


def bound_bodies(routes: Any) -> None:
    """Let every route of FastAPI read its body with bounds."""
    for route in routes:
        adapter = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if adapter is not None:
            adapter.validator = bounded_validator(adapter.core_schema)


def bounded_validator(schema: Any) -> SchemaValidator:
    """A validator for a schema of pydantic that stops at the first error of a list or object."""
    return SchemaValidator(_bounded(schema, LONGEST), _use_prebuilt=False)


def bounded_type(model: Any) -> Any:
    """The type ``model``, read with bounds, for callers that make a validator of their own."""
    read = bounded_validator(TypeAdapter(model).core_schema).validate_python
    schema = core_schema.no_info_plain_validator_function(read)
    of_class = classmethod(lambda cls, source, handler: schema)
    return type(model.__name__, (), {"__get_pydantic_core_schema__": of_class})


def _bounded(schema: Any, longest: int) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(part, longest) for part in schema)
    if not isinstance(schema, dict):
        return schema
    copy = {
        key: part
        if key in ("metadata", "serialization")
        else _bounded(part, LONGEST_OF_FIELD.get(key, longest))
        for key, part in schema.items()
    }
    if copy.get("type") in ("list", "set", "tuple", "dict"):
        copy["fail_fast"] = True
    for field in LONGEST_OF_FIELD:
        part = copy.get(field)
        if isinstance(part, dict) and part.get("type") == "model-field":
            # The check goes inside of a default: a field whose outermost part is not its default
            # counts as required in pydantic.
            outer = part["schema"] if part["schema"].get("type") == "default" else part
            outer["schema"] = core_schema.no_info_before_validator_function(
                _with_few_parts, outer["schema"]
            )
    is_list = copy.get("type") in ("list", "generator")
    if is_list and not _is_plain(copy.get("items_schema") or {}):
        copy.setdefault("max_length", longest)
    if copy.get("config", {}).get("extra_fields_behavior") == "forbid":
        # Each unknown name would be an error of its own. The outermost part takes the name ("ref")
        # by which other parts refer to this one.
        name = copy.pop("ref", None)
        return core_schema.no_info_before_validator_function(_with_few_names, copy, ref=name)
    return copy


def _with_few_names(given: Any) -> Any:
    """Return what should be an object as it came. Raises ValueError if it has too many names."""
    if isinstance(given, dict) and len(given) > LONGEST:
        raise ValueError(f"{len(given)} names; allowed: at most {LONGEST}.")
    return given


def _with_few_parts(messages: Any) -> Any:
    """Return messages, or lists of them, as they came. Raises ValueError for too many parts.

    Parts are not counted in a list that is too long itself: the validator behind this refuses it.
    """
    if isinstance(messages, list) and len(messages) <= max(LONGEST_OF_FIELD.values()):
        each = chain.from_iterable(one if isinstance(one, list) else (one,) for one in messages)
        contents = (one.get("content") for one in each if isinstance(one, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MOST_PARTS:
            raise ValueError(f"{num_parts} parts of contents; allowed: at most {MOST_PARTS}.")
    return messages


def _is_plain(schema: Any) -> bool:
    choices = schema.get("choices", ()) if schema.get("type") == "union" else (schema,)
    return bool(choices) and all(choice.get("type") in PLAIN for choice in choices)
