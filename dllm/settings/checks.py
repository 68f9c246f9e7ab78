"""Checks of options and settings; errors say what was given, what is allowed, and guess typos."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

MOST_NAMES = 12  # that a message lists


def did_you_mean(given: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for the most similar known word; empty if none is similar."""
    nearest = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def missing_folder(given: str, may_be_of_hub: bool = False) -> str | None:
    """What is wrong with a model's name that is plainly a path, and leads nowhere.

    A name is a path if it begins with ``.``, ``/`` or ``~``, or if the folder in front of its last
    slash exists.

    Args:
        may_be_of_hub: names with one slash are no paths: vLLM looks for ``google/x`` on the model
            hub, also where there is a folder ``google``.

    Returns:
        None for what exists, or is no path. Otherwise a sentence that names the first folder
        of the path that is missing, the most similar one beside it, and the others there.
    """
    try:
        path = Path(given).expanduser()
        is_below = given.count("/") > int(may_be_of_hub) and path.parent.is_dir()
        is_path = is_below or given.startswith((".", "/", "~"))
        if path.exists() or not is_path:
            return None
        missing = next(each for each in (path, *path.parents) if each.parent.is_dir())
        there = sorted(each.name for each in missing.parent.iterdir() if each.is_dir())
    except (OSError, RuntimeError):  # not ours to read, too long, or of an unknown user
        return None
    shown = ", ".join(there[:MOST_NAMES]) + (", ..." if there[MOST_NAMES:] else "")
    hint = did_you_mean(missing.name, there)
    return f"there is no folder {missing}{hint}; in {missing.parent}: {shown or 'no folders'}."


@dataclass(frozen=True)
class FloatRange:
    """The numbers from ``low`` to ``high``. As texts, this and its like complete "allowed: "."""

    low: float
    high: float
    excludes_low: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` is a number in the range; False for a bool and for NaN."""
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
            and not (self.excludes_low and value == self.low)
        )

    def __str__(self) -> str:
        low = f"above {self.low:.10g}" if self.excludes_low else f"of at least {self.low:.10g}"
        return f"a number {low} and at most {self.high:.10g}"


@dataclass(frozen=True)
class IntRange:
    """Integers from ``low`` to ``high``, both allowed."""

    low: int
    high: float = math.inf

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` is an integer (a bool is none) in the range."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        most = "" if self.high == math.inf else f" and at most {self.high}"
        return f"an integer of at least {self.low}{most}"


@dataclass(frozen=True)
class Choices:
    """Names, of which one has to be given."""

    names: tuple[str, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class Values:
    """Whatever ``accepts`` is true for; ``text`` says in a message what that is."""

    accepts: Callable[[Any], bool]
    text: str

    def __contains__(self, value: object) -> bool:
        return self.accepts(value)

    def __str__(self) -> str:
        return self.text


# Types of options, with what is allowed.
Flag = Annotated[bool, Values(lambda one: isinstance(one, bool), "true or false")]
Text = Annotated[str | None, Values(lambda one: isinstance(one, str), "a string")]


def is_list_of(kind: type, value: object) -> bool:
    """Whether a value is a list (or tuple) of this type; True and False are no integers."""
    return isinstance(value, list | tuple) and all(type(one) is kind for one in value)


def refuse_value(name: str, value: object, allowed: str) -> NoReturn:
    """Raises ValueError for an option of a server. ``allowed`` completes "allowed: ..."."""
    raise ValueError(f"{name} = {value!r}; allowed: {allowed}.")


def check_int(name: str, value: object, at_least: int) -> None:
    """Raises ValueError for what is no integer (a bool is none) or less than ``at_least``."""
    if value not in (allowed := IntRange(at_least)):
        refuse_value(name, value, str(allowed))


def check_fields(options: Any, where: str) -> None:
    """Refuse a field of some options whose value is neither its default nor allowed.

    A field says what it allows by a type ``Literal[...]`` or ``Annotated[..., allowed values]``.

    Args:
        where: the name of the options in error messages.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    types = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value, kind = getattr(options, field.name), types[field.name]
        if get_origin(kind) is Literal:
            allowed = Choices(get_args(kind))
        elif get_origin(kind) is Annotated:
            (allowed,) = kind.__metadata__
        else:
            continue
        if value is not field.default and value not in allowed:
            refuse_value(f"{where}: {field.name}", value, str(allowed))


def known_fields(kind: type, given: object, where: str) -> Mapping[str, Any]:
    """``given``, checked to be a mapping whose keys are all fields of the dataclass ``kind``.

    Args:
        where: the name of the object in error messages.

    Raises:
        ValueError: it is not a mapping, or a key is unknown; names the most similar known key.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be an object, got {given!r}.")
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ValueError(f"{where} has no option {key!r}{hint}; known: {', '.join(known)}.")
    return given
