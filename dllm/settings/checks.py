"""Checks of options and settings: what was given, what is allowed, what may have been meant."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn


def did_you_mean(given: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known word, or nothing."""
    nearest = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


@dataclass(frozen=True)
class FloatRange:
    """The numbers from ``low`` (unless excluded) to ``high``; its text completes "allowed: "."""

    low: float
    high: float
    excludes_low: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` is a number (a bool is none, and neither is NaN) in the range."""
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
    """The integers from ``low`` to ``high``; its text completes "allowed: "."""

    low: int
    high: int

    def __contains__(self, value: object) -> bool:
        """Whether ``value`` is an integer (a bool is none) in the range."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        return f"an integer of at least {self.low} and at most {self.high}"


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the ValueError of a field whose value is not among the allowed ones."""
    raise ValueError(f"{name} = {value!r}; allowed: {allowed}.")


def check_fields(
    holder: object, at_least: Mapping[str, int], ranges: Mapping[str, FloatRange]
) -> None:
    """Refuse attributes that are no integer of at least so much, or not in their range."""
    for name, least in at_least.items():
        check_int(name, getattr(holder, name), least)
    for name, allowed in ranges.items():
        if getattr(holder, name) not in allowed:
            refuse(name, getattr(holder, name), str(allowed))


def check_int(name: str, value: object, at_least: int) -> None:
    """Refuse what is no integer (a bool is none) or less than ``at_least``, with a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        refuse(name, value, f"an integer of at least {at_least}")


def known_fields(kind: type, given: object, where: str) -> Mapping[str, Any]:
    """``given``, if it is an object all of whose keys are fields of the dataclass ``kind``.

    Args:
        where: what messages call the object.

    Raises:
        ValueError: it is no object, or a key is unknown; with the nearest known one.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be an object, got {given!r}.")
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ValueError(f"{where} has no option {key!r}{hint}; known: {', '.join(known)}.")
    return given


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ValueError: there is no such file, or no TOML in it.
    """
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(str(error)) from None
