"""How many requests of the engine one HTTP request starts, and how many of them at once.

Each prompt of a list is one for each of its ``n`` samples, and for each width of a hole that is
tried (``api.fill``); typed decisions and scores have bounds of their own. The engine serves who
comes first. So no more requests of one HTTP request are in it than run at a time: whoever comes
later waits for the first of them, and not for all. (The ``n`` samples of a prompt start together.)
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from dllm.settings.request import refuse

T = TypeVar("T")

MAX_REQUESTS = 512  # of one HTTP request


@dataclass
class Tally:
    """The requests that an HTTP request has asked for so far; none of them has started.

    Attributes:
        places: how many of them may be in the engine at a time.
    """

    places: asyncio.Semaphore
    num_requests: int = 0

    def add(self, number: int, parameter: str) -> None:
        """Count ``number`` more requests.

        Args:
            parameter: what multiplies them, for the error.

        Raises:
            VLLMValidationError: there are too many.
        """
        self.num_requests += number
        if self.num_requests > MAX_REQUESTS:
            refuse(
                parameter,
                f"{parameter}: prompts x n x widths of a hole come to {self.num_requests} or more; "
                f"allowed: at most {MAX_REQUESTS} for an HTTP request. Send several requests.",
            )


def places_of(vllm_config: Any) -> asyncio.Semaphore:
    """The places of one HTTP request in the engine: as many as it runs requests at a time."""
    running = vllm_config.scheduler_config.max_num_seqs
    return asyncio.Semaphore(running * vllm_config.parallel_config.data_parallel_size)


async def in_turn(
    places: asyncio.Semaphore, outputs: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    """The outputs of a request, which starts when there is a place for it.

    Args:
        outputs: what ``generate`` of vLLM returns; it starts with the first output asked for.
    """
    async with places, aclosing(outputs):
        async for output in outputs:
            yield output


# Set by a route while it handles a request; None outside of one.
current_tally: ContextVar[Tally | None] = ContextVar("current_tally", default=None)
