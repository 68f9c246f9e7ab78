"""vLLM's AsyncLLM, derived: what happens to a request between its route and the engine core.

``generate`` is called when a route starts a request, and checks it. ``add_request`` is called when
the first output is asked for, and sends the request to the engine core.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from dllm.api import fill
from dllm.api.engine_requests import in_turn
from dllm.api.http_request import current
from dllm.models import settings_of
from dllm.patches.admission import prepare, refuse_grammar_of_piece
from dllm.patches.grammars import needs_table, serialized_grammar, wait_before_the_stream
from dllm.patches.metrics import CountingLoggers
from dllm.patches.served import Part
from dllm.patches.streaming import TracedOutputs, start_watching
from dllm.settings.denoising import WHOLE_SEQUENCE, unread_canvases
from dllm.settings.request import refuse, with_grammar


class PreparingLLM(AsyncLLM):
    """Of any server of ours. Its parameters are checked before HTTP 200 of a stream is sent."""

    logger_manager: Any = Part(CountingLoggers)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's is a generator, and checks when the first item is taken from it."""
        params = prepare(self.input_processor, prompt, sampling_params)
        if isinstance(prompt, AsyncGenerator):
            prompt = _prepared_pieces(self.input_processor, params, prompt)
        return self._started(prompt, sampling_params, params, request_id, *args, **kwargs)

    def _started(self, prompt: Any, asked: Any, prepared: Any, *args: Any, **options: Any) -> Any:
        return super().generate(prompt, prepared, *args, **options)


class CanvasLLM(PreparingLLM):
    """Of a diffusion model."""

    output_processor: Any = Part(TracedOutputs)

    def __init__(self, *args: Any, **options: Any) -> None:
        self._turn = asyncio.Lock()
        super().__init__(*args, **options)

    def _started(
        self, prompt: Any, asked: Any, prepared: Any, request_id: str, *args: Any, **options: Any
    ) -> Any:
        request_id = start_watching(self, prepared, request_id)
        hole = (prompt, asked, request_id, *args)
        generate = partial(AsyncLLM.generate, self)
        if (filled := _start_fill(self, generate, *hole, **options)) is not None:
            return filled
        _count(1, prepared.n)
        wait_before_the_stream(self, prompt, prepared, _reasoning(options))
        return _paced(generate, prompt, prepared, request_id, *args, **options)

    async def add_request(
        self, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Let a request wait for its grammar, and the server answer others between two prompts of
        a list, which vLLM starts in one turn of the event loop.
        """
        if needs_table(params):
            table = await serialized_grammar(self, params, prompt, *_reasoning(kwargs))
            params = with_grammar(params, table)
        async with self._turn:
            await asyncio.sleep(0)  # while others wait for their turn
            return await super().add_request(request_id, prompt, params, *args, **kwargs)


async def _prepared_pieces(processor: Any, params: Any, pieces: AsyncGenerator[Any, None]) -> Any:
    """Each piece of a prompt may have parameters of its own in place of ``params``."""
    async with aclosing(pieces):
        async for piece in pieces:
            own = piece.sampling_params
            refuse_grammar_of_piece(processor, own or params)
            yield replace(piece, sampling_params=own and prepare(processor, piece.prompt, own))


def _reasoning(options: Mapping[str, Any]) -> tuple[bool | None, Mapping[str, Any]]:
    """From arguments of vLLM's routes: whether reasoning has ended, and arguments of its parser."""
    return options.get("reasoning_ended"), options.get("reasoning_parser_kwargs") or {}


def _count(number: int, num_samples: int) -> None:
    """Of the current HTTP request, for each sample. Raises VLLMValidationError if too many."""
    one = current.get()
    if one is not None:
        one.add(number * num_samples, "n" if num_samples > 1 else "prompt")


def _paced(generate: Any, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
    """What ``generate`` returns, for a request that waits for a place of its HTTP request."""
    one, outputs = current.get(), generate(prompt, params, *args, **options)
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
        return _paced(generate, prompt, params, *args, **options)

    decode = partial(
        llm.renderer.get_tokenizer().decode, skip_special_tokens=params.skip_special_tokens
    )
    return fill.filled(start, hole, widths, decode, prompt, params, *args, **options)
