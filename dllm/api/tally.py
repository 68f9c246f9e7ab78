"""How many requests of the engine one HTTP request starts, over all that it multiplies.

Each prompt of a list is one for each of its ``n`` samples, and for each width of a hole that is
tried (``api.fill``). Everybody who comes later waits for all of them.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from dllm.settings.request import refuse

MAX_REQUESTS = 512  # of one HTTP request


@dataclass
class Tally:
    """The requests that an HTTP request has asked for so far; none of them has started."""

    num_requests: int = 0

    def add(self, number: int, parameter: str) -> None:
        """Count more of them.

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


# Set by a route while it handles a request; None outside of one.
current_tally: ContextVar[Tally | None] = ContextVar("current_tally", default=None)
