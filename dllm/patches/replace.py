"""Puts functions of ours in the place of vLLM's."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dllm.patches.served import Server

Ours = TypeVar("Ours", bound=Callable[..., Any])


def replaces(owner: Any, of: "Server | None" = None) -> Callable[[Ours], Ours]:
    """A decorator: vLLM's function, or method, of the same name becomes the decorated one.

    That is called with vLLM's function, and with what the caller passes. Async ones are awaited, or
    iterated, as before. ``of``: for such models alone, as the argument ``model_config`` says.
    """

    def put(ours: Ours) -> Ours:
        theirs = getattr(owner, ours.__name__)

        @functools.wraps(theirs)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if of is not None:
                from dllm.patches.served import model_of  # not where nothing of ours is served

                given = inspect.signature(theirs).bind(*args, **kwargs).arguments
                if model_of(given.get("model_config")) is not of:
                    return theirs(*args, **kwargs)
            return ours(theirs, *args, **kwargs)

        setattr(owner, ours.__name__, replacement)
        return ours

    return put
