"""Log lines about connections, of which a peer that comes and goes cannot make many."""

import logging
import time
from collections.abc import Callable

from dllm import LOGGER

EVERY_S = 10.0  # at most one line of a report

logger = logging.getLogger(LOGGER)


class Report:
    """Logs what holds when that has changed; for less than EVERY_S it may hold without a line.

    ``said``: what holds at the beginning and needs no log line.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, said: str = "") -> None:
        self._clock, self._said, self._said_at = clock, said, float("-inf")

    def __call__(self, what: str, level: int = logging.INFO) -> None:
        if what == self._said or self._clock() < self._said_at + EVERY_S:
            return
        logger.log(level, what)
        self._said, self._said_at = what, self._clock()
