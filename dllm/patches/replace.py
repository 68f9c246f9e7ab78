"""Puts functions of ours in the place of vLLM's."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Ours = TypeVar("Ours", bound=Callable[..., Any])


def replaces(owner: Any) -> Callable[[Ours], Ours]:
    """A decorator: vLLM's function, or method, of the same name becomes the decorated one.

    That is called with vLLM's function, and with what the caller passes. Async ones are awaited, or
    iterated, as before.
    """

    def put(ours: Ours) -> Ours:
        theirs = getattr(owner, ours.__name__)

        @functools.wraps(theirs)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        setattr(owner, ours.__name__, replacement)
        return ours

    return put
