"""Puts functions of ours in the place of vLLM's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Ours = TypeVar("Ours", bound=Callable[..., Any])


def replaces(owner: Any, name: str | None = None) -> Callable[[Ours], Ours]:
    """A decorator: vLLM's function ``name`` (default: the same) becomes the decorated one.

    That is called with vLLM's function, and with what the caller passes. What was a property or a
    class method is one again; both functions are then those behind it. Async ones are awaited, or
    iterated, as before.
    """

    def put(ours: Ours) -> Ours:
        place = name or ours.__name__
        kept = inspect.getattr_static(owner, place)
        theirs = getattr(kept, "fget", None) or getattr(kept, "__func__", kept)

        @functools.wraps(theirs)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        is_plain = theirs is kept
        setattr(owner, place, replacement if is_plain else type(kept)(replacement))
        return ours

    return put
