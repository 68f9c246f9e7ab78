"""Options as pydantic dataclasses: a field's type says what is allowed, its docstring what it does.

``read_options`` makes one of them from what a user wrote. ``table`` writes a page's table of them.
"""

import dataclasses
import json
from typing import Annotated, Any, TypeVar, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from dllm.settings.checks import did_you_mean

Made = TypeVar("Made")

CHECKED = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
)
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_INT32 = 2**31 - 1
# Of a setting that int32 tensors hold.
Count32 = Annotated[int, Field(ge=1, le=MAX_INT32)]
Natural32 = Annotated[int, Field(ge=0, le=MAX_INT32)]


def read_options(kind: type[Made], given: object, where: str = "") -> Made:
    """The options that a JSON value or a TOML table holds; what it leaves out has its default.

    Raises ValueError that names the first field that is unknown or not allowed, in ``where``.
    """
    try:
        # By way of JSON, which has no tuples: there, lists are taken for them.
        return TypeAdapter(kind).validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        raise ValueError(f"{where}: " * bool(where) + in_words(kind, error)) from None


def in_words(kind: Any, error: ValidationError) -> str:
    """The first mistake: the field, what was given, what is allowed."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        *of, name = first["loc"]
        group = _group(kind, of)
        known = [*group.__pydantic_fields__]
        hint = did_you_mean(str(name), known)
        place = f"{'.'.join(map(str, of))} has " if of else ""
        return f"{place}no option {name!r}{hint}; known: {', '.join(known)}."
    field = _field(kind, first["loc"])
    about = [one for one in errors if one["loc"][: len(field)] == field]
    name = ".".join(map(str, field))
    if first["type"] in ("missing", "missing_argument"):
        return f"{name} is missing."
    return f"{name} = {first['input']!r}; allowed: {allowed(about)}."


def allowed(errors: Any) -> str:
    """What a value may be, from the errors of its field: one for each form that it may have."""
    texts = (one["msg"].removeprefix("Input should be ") for one in errors)
    return " or ".join(dict.fromkeys(texts))


def _group(kind: Any, path: Any) -> Any:
    """The class of the options at a path of fields; None: the path leads to no options."""
    for name in path:
        fields = getattr(kind, "__pydantic_fields__", {})
        annotation = fields[name].annotation if name in fields else None
        forms = (annotation, *get_args(annotation))
        kind = next((one for one in forms if dataclasses.is_dataclass(one)), None)
    return kind


def _field(kind: Any, loc: Any) -> Any:
    """The part of an error's place that names fields; pydantic adds which form it tried."""
    depth = 1
    while depth < len(loc) and _group(kind, loc[:depth]) is not None:
        depth += 1
    return loc[:depth]
