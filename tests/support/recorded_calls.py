"""Notes the calls of a function, which does what it always does."""

from typing import Any

import pytest

Call = tuple[tuple[Any, ...], Any]  # the positional arguments, and the result


def record_calls(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """The calls of ``owner.name`` from here on, of a method of a class with its ``self``."""
    calls: list[Call] = []
    function = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append((args, result))
        return result

    patch.setattr(owner, name, spy)
    return calls
