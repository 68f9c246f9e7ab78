"""What one HTTP request starts is counted over all that it multiplies."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from vllm.exceptions import VLLMValidationError

from dllm.api.fill import at_once
from dllm.api.tally import MAX_REQUESTS, Tally, in_turn


def test_all_that_is_added_counts_together():
    tally = Tally(asyncio.Semaphore())
    tally.add(MAX_REQUESTS - 1, "prompt")
    tally.add(1, "prompt")
    with pytest.raises(VLLMValidationError) as refusal:
        tally.add(1, "n")
    assert refusal.value.parameter == "n"


def test_no_more_requests_start_than_there_are_places():
    """A place is free again behind a request that has ended, and behind one that failed."""
    inside, most, started = set(), [], []
    places = asyncio.Semaphore(3)

    async def outputs(number: int) -> AsyncIterator[int]:
        inside.add(number)
        started.append(number)
        most.append(len(inside))
        try:
            for _ in range(4):
                await asyncio.sleep(0)
                yield number
            if number == 7:
                raise KeyError(number)
        finally:
            inside.discard(number)

    async def consumed(number: int) -> int:
        return [output async for output in in_turn(places, outputs(number))][-1]

    async def run() -> None:
        assert await at_once(consumed(number) for number in range(7)) == [*range(7)]
        with pytest.raises(KeyError):
            await at_once(consumed(number) for number in range(7, 20))
        assert await at_once(consumed(number) for number in range(20, 30)) == [*range(20, 30)]

    asyncio.run(run())
    assert max(most) == 3 and not inside
    assert started[:10] == [*range(10)] and started[-10:] == [*range(20, 30)]
