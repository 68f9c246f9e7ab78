"""What one HTTP request starts is counted over all that it multiplies."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GenerationError, VLLMValidationError

from dllm.api.engine_requests import at_once, in_turn
from dllm.api.http_request import MAX_REQUESTS, HttpRequest, handling
from dllm.settings.request import refuse


def test_all_that_is_added_counts_together():
    one = HttpRequest(asyncio.Semaphore())
    one.add(MAX_REQUESTS - 1, "prompt")
    one.add(1, "prompt")
    with pytest.raises(VLLMValidationError) as refusal:
        one.add(1, "n")
    assert refusal.value.parameter == "n"


def test_a_refusal_names_what_the_client_has_sent():
    one = HttpRequest(asyncio.Semaphore(), client_names={"structured_outputs": "tools"})
    for sent, named in (("structured_outputs", "tools"), ("seed", "seed")):
        with pytest.raises(VLLMValidationError, match=f"^{named}: no") as refusal, handling(one):
            refuse(sent, f"{sent}: no")
        assert refusal.value.parameter == named


def test_no_more_requests_start_than_there_are_places():
    """A place is free again behind a request that has ended, and behind one that failed."""
    inside, most, started = set(), [], []
    places = asyncio.Semaphore(3)

    async def outputs(number: int) -> AsyncIterator[Any]:
        inside.add(number)
        started.append(number)
        most.append(len(inside))
        try:
            for _ in range(4):
                await asyncio.sleep(0)
                yield SimpleNamespace(number=number, outputs=[])
            if number == 7:
                raise KeyError(number)
        finally:
            inside.discard(number)

    async def consumed(number: int) -> int:
        return [output async for output in in_turn(places, outputs(number))][-1].number

    async def run() -> None:
        assert await at_once(consumed(number) for number in range(7)) == [*range(7)]
        with pytest.raises(KeyError):
            await at_once(consumed(number) for number in range(7, 20))
        assert await at_once(consumed(number) for number in range(20, 30)) == [*range(20, 30)]

    asyncio.run(run())
    assert max(most) == 3 and not inside
    assert started[:10] == [*range(10)] and started[-10:] == [*range(20, 30)]


def test_a_request_that_the_engine_gave_up_is_an_error_that_names_the_models_output():
    async def outputs() -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error")])

    async def ask() -> list[Any]:
        return [one async for one in in_turn(asyncio.Semaphore(1), outputs())]

    with pytest.raises(GenerationError, match="The model's output is not finite"):
        asyncio.run(ask())
