"""``vllm serve --middleware tests.support.loop_gap.LoopGap``: how long the event loop was held.

``GET /loop-gap`` answers how long a timer of the loop had to wait at most while the thread of the
loop was at work, and begins anew. It is CPU time of that thread, in units of the time in which the
same thread reads ``MEGABYTE`` as JSON: what else the machine does makes both longer. The first such
request starts the timer, and ``?stop`` ends it.
"""

import asyncio
import json
import time
from typing import Any

MEGABYTE = json.dumps([{"a": 1}] * 100_000)


class LoopGap:
    """An ASGI middleware that watches the loop when it is asked to."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._watching: asyncio.Task[None] | None = None
        self._longest = 0.0
        self._before = 0.0  # when the last turn of the timer ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer ``/loop-gap``; every other request goes on."""
        if scope.get("path") != "/loop-gap":
            await self._app(scope, receive, send)
            return
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        elif scope["query_string"] == b"stop":
            self._watching.cancel()
            self._watching = None
        before = time.thread_time()
        json.loads(MEGABYTE)
        self._before = time.thread_time()  # this was no request
        unit = self._before - before
        body = json.dumps({"longest": self._longest / unit, "unit_ms": unit * 1000}).encode()
        self._longest = 0.0
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _watch(self) -> None:
        self._before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            after = time.thread_time()
            self._longest = max(self._longest, after - self._before)
            self._before = after
