"""Patches of vLLM's AsyncLLM: what happens to a request between its route and the engine core.

``generate`` is called when a route starts a request, and checks it. ``add_request`` is called when
the first output is asked for, and sends the request to the engine core.
"""

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from dllm.api import fill
from dllm.api.engine_requests import in_turn
from dllm.api.http_request import current
from dllm.models import FAMILIES, settings_of
from dllm.patches.admission import prepare
from dllm.patches.grammars import needs_table, serialized_grammar, wait_before_the_stream
from dllm.patches.replace import replaces
from dllm.patches.streaming import start_watching
from dllm.settings.denoising import WHOLE_SEQUENCE, unread_canvases
from dllm.settings.request import refuse, with_grammar


def check_requests_early() -> None:
    """``AsyncLLM.generate`` is a generator. vLLM's checks run when the first item is taken from it;
    by then the server has sent HTTP 200. Here a request is prepared when ``generate`` is called.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    @replaces(AsyncLLM)
    def generate(
        theirs: Any,
        self: Any,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        params = prepare(self.input_processor, prompt, sampling_params)
        if isinstance(prompt, AsyncGenerator):
            prompt = _prepared_pieces(self.input_processor, prompt)
        if self.model_config.architecture in FAMILIES:
            request_id = start_watching(self, params, request_id)
            hole = (prompt, sampling_params, request_id, *args)
            if (filled := _start_fill(self, theirs, *hole, **kwargs)) is not None:
                return filled
            _count(1, params.n)
            wait_before_the_stream(self, prompt, params, _reasoning(kwargs))
        given = (self, prompt, params, request_id, *args)
        return _paced(theirs, *given, **kwargs)


async def _prepared_pieces(processor: Any, pieces: AsyncGenerator[Any, None]) -> Any:
    """Each piece of a prompt may have parameters of its own."""
    async with aclosing(pieces):
        async for piece in pieces:
            own = piece.sampling_params
            yield replace(piece, sampling_params=own and prepare(processor, piece.prompt, own))


def _reasoning(options: Mapping[str, Any]) -> tuple[bool | None, Mapping[str, Any]]:
    """From arguments of vLLM's routes: whether reasoning has ended, and arguments of its parser."""
    return options.get("reasoning_ended"), options.get("reasoning_parser_kwargs") or {}


def _count(number: int, num_samples: int) -> None:
    """Of the current HTTP request, for each sample. Raises VLLMValidationError if too many."""
    one = current.get()
    if one is not None:
        one.add(number * num_samples, "n" if num_samples > 1 else "prompt")


def _paced(generate: Any, llm: Any, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
    """What ``generate`` returns, for a request that waits for a place of its HTTP request."""
    one, outputs = current.get(), generate(llm, prompt, params, *args, **options)
    return outputs if one is None else in_turn(one.places, outputs)


def _start_fill(
    llm: Any, generate: Any, prompt: Any, params: Any, *args: Any, **options: Any
) -> Any:
    """The outputs of a request that a route with a suffix starts; None for every other request.

    Raises VLLMValidationError if hole and suffix do not fit.
    """
    one = current.get()
    if one is None or one.hole is None:
        return None
    hole = one.hole
    prompt_len = len(prompt["prompt_token_ids"])
    settings = settings_of(llm.vllm_config)
    if settings.block_size == WHOLE_SEQUENCE:
        refuse("suffix", f"suffix is not served: {unread_canvases(settings)}")
    if (block := settings.block_size) > 1:
        one_step = settings.one_step
        hole = replace(hole, canvas_width=block - prompt_len % block, one_step=one_step)
    room = llm.model_config.max_model_len - prompt_len
    widths = hole.width_range(params.min_tokens, params.max_tokens, room)
    _count(len(widths), params.n)
    candidate = hole.candidate(params, widths[-1], 0)
    prepare(llm.input_processor, prompt, candidate)

    def start(prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        params = prepare(llm.input_processor, prompt, params)
        return _paced(generate, llm, prompt, params, *args, **options)

    decode = functools.partial(
        llm.renderer.get_tokenizer().decode, skip_special_tokens=params.skip_special_tokens
    )
    return fill.filled(start, hole, widths, decode, prompt, params, *args, **options)


def start_in_turn() -> None:
    """Let a request wait for its grammar, and the API server answer others between two requests.

    vLLM starts all prompts of a list in one turn of the event loop.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    turns: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()

    @replaces(AsyncLLM)
    async def add_request(
        theirs: Any, self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.model_config.architecture not in FAMILIES:
            return await theirs(self, request_id, prompt, params, *args, **kwargs)
        if needs_table(self, params):
            table = await serialized_grammar(self, params, prompt, *_reasoning(kwargs))
            params = with_grammar(params, table)
        async with turns.setdefault(self, asyncio.Lock()):
            await asyncio.sleep(0)  # while others wait for their turn
            return await theirs(self, request_id, prompt, params, *args, **kwargs)
