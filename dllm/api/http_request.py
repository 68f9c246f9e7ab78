"""What the parts that serve one HTTP request share, and how much of the engine it may ask for.

An HTTP request may start many requests of the engine. Each prompt of a list is one for each of its
``n`` samples, and for each width of a hole that is tried (``api.fill``); typed decisions and scores
have bounds of their own. The engine serves who comes first. So no more requests of one HTTP request
are in it than run at a time: whoever comes later waits for the first of them, and not for all. (The
``n`` samples of a prompt start together.)
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from dllm.settings.request import refuse

if TYPE_CHECKING:
    from dllm.api.fill import Fill
    from dllm.api.watching import CanvasFeed

MAX_REQUESTS = 512  # of the engine
# Of the bodies of our routes. With a bound (here vLLM's), pydantic refuses texts that hold half of
# a surrogate pair: JSON may hold it, and neither the tokenizer nor an answer can.
BODY = ConfigDict(extra="forbid", str_max_length=10 << 20)


@dataclass
class HttpRequest:
    """An HTTP request while its route handles it."""

    places: asyncio.Semaphore  # of the requests that are in the engine
    num_requests: int = 0  # of the engine that it has asked for so far
    # They wait for the grammars of these, each of which may be refused.
    compilations: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)
    hole: "Fill | None" = None  # in front of the suffix of a completion
    feed: "CanvasFeed | None" = None  # shows unfinished canvases, or traces, of its answer
    client_names: dict[str, str] = field(default_factory=dict)  # of parameters, by ours

    def add(self, number: int, parameter: str) -> None:
        """Of the engine, multiplied by ``parameter``. Raises VLLMValidationError: too many."""
        self.num_requests += number
        if self.num_requests > MAX_REQUESTS:
            refuse(
                parameter,
                f"{parameter}: prompts x n x widths of a hole come to {self.num_requests} or more; "
                f"allowed: at most {MAX_REQUESTS} for an HTTP request. Send several requests.",
            )


# Set by a route of our models while it handles a request. Tasks that it starts keep a copy.
current: ContextVar[HttpRequest | None] = ContextVar("current", default=None)


@contextmanager
def handling(one: HttpRequest) -> Iterator[None]:
    """Make it the current one. What is refused meanwhile is named as the client has named it."""
    from vllm.exceptions import VLLMValidationError

    token = current.set(one)
    try:
        yield
    except VLLMValidationError as error:
        ours = error.parameter
        if ours not in one.client_names:
            raise
        name, text = one.client_names[ours], str(error.args[0])
        if text.startswith(ours):
            text = name + text.removeprefix(ours)
        raise VLLMValidationError(text, parameter=name) from error
    finally:
        current.reset(token)
