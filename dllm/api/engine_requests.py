"""Requests of the engine that one HTTP request makes: in turn, at once, or to read a canvas.

A canvas is read by a request of one denoise step, whose logprobs are the answer.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

FAILED = (
    "The model's output is not finite (NaN or infinity), or not a text of the grammar. The log of "
    "the server says which."
)
T = TypeVar("T")
# (prompt, parameters, request id) -> the finished request.
Read = Callable[[Any, "SamplingParams", str], Coroutine[Any, Any, "RequestOutput"]]


def places_of(vllm_config: Any) -> asyncio.Semaphore:
    """The places of one HTTP request in the engine: as many as it runs requests at a time."""
    running = vllm_config.scheduler_config.max_num_seqs
    return asyncio.Semaphore(running * vllm_config.parallel_config.data_parallel_size)


async def in_turn(
    places: asyncio.Semaphore, outputs: AsyncGenerator["RequestOutput", None]
) -> AsyncGenerator["RequestOutput", None]:
    """Outputs of vLLM's ``generate``, which starts with the first one asked for, if there is a
    place.

    Raises GenerationError: the engine has ended the request with an error; the client gets HTTP
    500.
    """
    from vllm.exceptions import GenerationError

    async with places, aclosing(outputs):
        async for output in outputs:
            if any(one.finish_reason == "error" for one in output.outputs):
                raise GenerationError(FAILED)
            yield output


def read_params(
    num_tokens: int, scored: Collection[int], one_step: Mapping[str, Any], **more: Any
) -> "SamplingParams":
    """Of a canvas whose first ``num_tokens`` tokens are emitted after one denoise step.

    ``scored``: tokens whose logprobs each of them gets. ``one_step``: extra arguments, those of
    ``DenoiseSettings.one_step`` among them.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0,
        ignore_eos=True,
        logprob_token_ids=sorted({*scored}),
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,  # nobody reads what the model would say
        extra_args=dict(one_step),
        **more,
    )


def reader(engine: Any, options: Mapping[str, Any]) -> Read:
    """Of one HTTP request, whose reads wait for its places in the engine.

    ``options`` of each: further arguments of vLLM's ``generate``.
    """
    places = places_of(engine.vllm_config)

    def read(prompt: Any, params: "SamplingParams", name: str) -> Any:
        return finished(in_turn(places, engine.generate(prompt, params, name, **options)))

    return read


async def options_of(serving: Any, request: Any, raw_request: Any) -> dict[str, Any]:
    """What vLLM's routes give ``generate`` of an HTTP request beside prompt and parameters."""
    return {
        "lora_request": serving._maybe_get_adapters(request),
        "trace_headers": await serving._get_trace_headers(raw_request.headers),
        "priority": request.priority,
    }


async def at_once(started: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at once; if one fails, the others are cancelled.

    They start one after the other, and the event loop goes on between them.
    """
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in started:
                tasks.append(group.create_task(coroutine))
                await asyncio.sleep(0)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def finished(results: AsyncIterable[Any]) -> Any:
    """Raises HTTPException 503 if the request was aborted, as ``/pause`` does by default."""
    from fastapi import HTTPException  # not in the worker

    output = [result async for result in results][-1]
    if output.outputs[0].finish_reason == "abort":
        raise HTTPException(503, "The server aborted this request. Send it again.")
    return output
