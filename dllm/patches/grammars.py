"""Structured outputs: grammars are compiled in the API server.

    admission       the request, and the form of its grammar      -> HTTP 400
    before engine   a child process compiles the grammar's table  -> HTTP 400
    engine core     checks with the table what is emitted (``engine.emitted_blocks``)
    worker          reads the table from the request (``engine.grammars``)

So a grammar is compiled once, within limits of time and memory, and all hold the same table.
"""

import asyncio
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output import StructuredOutputManager

from dllm.api.http_request import current
from dllm.api.structured_outputs import refusing, spec_of, thoughts_of
from dllm.grammar.compile import Grammars, tokens_of
from dllm.grammar.constraint import Constraint
from dllm.patches.admission import prepare, with_resolved_ids
from dllm.patches.metrics import CountingLoggers
from dllm.patches.replace import replaces
from dllm.patches.served import Part
from dllm.patches.streaming import TracedOutputs
from dllm.settings.request import has_structured_outputs, refuse, with_grammar


@cache
def read_no_grammars() -> None:
    """Leave grammars to the process that compiles them, which has limits.

    vLLM lets xgrammar read some on the event loop: 65 kB of a structural tag with
    ``minProperties`` take minutes. Called in a front end of one of our models.
    """
    from vllm.v1.structured_output import backend_xgrammar

    @replaces(backend_xgrammar)
    def validate_xgrammar_grammar(theirs: Any, sampling_params: SamplingParams) -> None:
        """Any is taken."""


class TableManager(StructuredOutputManager):
    """In the engine core: checks with the request's table what is emitted."""

    def grammar_init(self, request: Any) -> None:
        """vLLM would compile the grammar again."""
        asked = request.structured_output_request
        if asked is None:
            return
        from dllm.engine.emitted_blocks import EmittedText  # heavy; only the engine core needs it

        try:
            asked.grammar = EmittedText.of_request(request.sampling_params)
        except Exception as error:  # vLLM ends this request, and no other one
            asked.grammar = error


class PreparingEngine(LLMEngine):
    """vLLM's Python classes: as ``async_llm``."""

    logger_manager: Any = Part(CountingLoggers)

    def add_request(
        self, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        params = self._completed(prompt, prepare(self.input_processor, prompt, params))
        return super().add_request(request_id, prompt, params, *args, **kwargs)

    def _completed(self, prompt: Any, params: Any) -> Any:
        return params


class CanvasEngine(PreparingEngine):
    """Of a diffusion model: its grammars are compiled and sent with the requests."""

    output_processor: Any = Part(TracedOutputs)

    def _completed(self, prompt: Any, params: Any) -> Any:
        if not needs_table(params):
            return params
        with refusing():
            table = _begin(self, params).result()
        thoughts = thoughts_of(self.input_processor, prompt, None, {})
        return with_grammar(params, Constraint.serialize(table, thoughts))


def wait_before_the_stream(
    llm: Any, prompt: Any, params: Any, reasoning: tuple[bool | None, Mapping[str, Any]]
) -> None:
    """Let the route that starts a request wait for its grammar, which may be refused: when the
    first item is taken from a stream, vLLM has sent HTTP 200.
    """
    one = current.get()
    if one is not None and needs_table(params):
        one.compilations.append(lambda: serialized_grammar(llm, params, prompt, *reasoning))


def needs_table(params: Any) -> bool:
    return isinstance(params, SamplingParams) and has_structured_outputs(params)


async def serialized_grammar(
    engine: Any,
    params: Any,
    prompt: Any,
    reasoning_ended: bool | None,
    of_parser: Mapping[str, Any],
) -> bytes:
    """As the worker gets it; other requests go on meanwhile.

    ``reasoning_ended``: None: the reasoning parser says it of the prompt.
    """
    with refusing():
        # Shielded: a client that hangs up does not end it for others.
        table = await asyncio.shield(asyncio.wrap_future(_begin(engine, params)))
    thoughts = thoughts_of(engine.input_processor, prompt, reasoning_ended, of_parser)
    return Constraint.serialize(table, thoughts)


def _begin(engine: Any, params: Any) -> Future[bytes]:
    """A thread makes the table. Raises as ``Grammars.begin`` does."""
    processor = engine.input_processor
    stops = frozenset(with_resolved_ids(processor, params).all_stop_token_ids)
    if not stops:
        refuse(
            "structured_outputs",
            "This model has no end-of-sequence token, so no text would end. Name one in "
            "stop_token_ids.",
        )
    is_compact = processor.structured_outputs_config.disable_any_whitespace
    return _grammars_of(processor).begin(spec_of(params.structured_outputs, is_compact), stops)


_grammars: weakref.WeakKeyDictionary[Any, Grammars] = weakref.WeakKeyDictionary()


def _grammars_of(processor: Any) -> Grammars:
    """One ``Grammars`` for each engine: it keeps what it has compiled."""
    if processor not in _grammars:
        vocab_size = processor.model_config.get_vocab_size()
        _grammars[processor] = Grammars(partial(tokens_of, processor.tokenizer, vocab_size))
    return _grammars[processor]
