"""Grammars take turns at being compiled: a few at once, some wait, and further ones are refused."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from dllm.grammar.automaton import TooSlow
from dllm.grammar.children import MOST_CHILDREN

MOST_WAITING = 16  # different ones; further ones are refused


class Turns:
    """For the requests of an event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_CHILDREN, thread_name_prefix="grammar")
        self._begun: dict[Hashable, Future[bytes]] = {}  # that run or wait

    async def take(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns, in a thread; requests with equal keys share it.

        Raises:
            TooSlow: too many others wait.
        """
        future = self._begun.get(key)
        if future is None:
            if len(self._begun) >= MOST_CHILDREN + MOST_WAITING:
                raise TooSlow(
                    f"{MOST_WAITING} other grammars wait to be compiled. Send the request later."
                )
            future = self._begun[key] = self._threads.submit(make)
            future.add_done_callback(lambda _: self._begun.pop(key))
        # Shielded: a client that hangs up does not end it for others.
        return await asyncio.shield(asyncio.wrap_future(future))
