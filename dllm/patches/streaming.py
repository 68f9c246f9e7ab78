"""In the API server: unfinished canvases and traces in chats and completions.

A route that can show them calls ``create_watched``, which opens a feed (``HttpRequest.feed``) while
the request starts. Everywhere else ``diffusion_stream`` is refused. Traces are in the outputs of
vLLM's Python classes as well.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NoReturn

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from dllm.api.events import TRACE_FIELD, CanvasWriter, Stream, TextWriter, TraceWriter
from dllm.api.http_request import current
from dllm.api.watching import CanvasFeed, Watchers, frames_taken, has_frames, interleaved
from dllm.engine.derived import as_one_of
from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.settings.request import STREAM, TRACE, refuse, traced
from dllm.settings.server import options_of

Create = Callable[[Any, Any], Awaitable[Any]]  # what a route calls: request, raw request


def refuse_unseen_canvases(params: Any, vllm_config: Any) -> None:
    """Raises VLLMValidationError for canvases or traces that no stream of the route shows."""
    is_shown = (params.extra_args or {}).get(STREAM) is not None
    is_watched = (one := current.get()) is not None and one.feed is not None
    if is_shown and not is_watched:
        refuse_route(STREAM)
    worker = vllm_config.parallel_config.worker_cls
    asked = STREAM if is_shown else TRACE
    is_taken = worker in (CPU_WORKER, GPU_WORKER)
    if is_watched and not is_taken and (is_shown or traced(params) is not None):
        refuse(asked, f"{asked} is not served with the worker {worker}. Leave it out.")


def start_watching(llm: Any, params: Any, request_id: str) -> str:
    """Called before a request starts, with vLLM's ``AsyncLLM``. Returns its id for the engine."""
    if (params.extra_args or {}).get(STREAM) is None and traced(params) is None:
        return request_id
    one = current.get()
    if one is None or one.feed is None:
        # Nobody watches, but frames are taken out before vLLM cuts what arrives into slices. In a
        # slice behind the one that ends its request, a frame would find no request.
        _watchers_of(llm)
        return request_id
    one.feed.request_id = one.feed.request_id or request_id
    return _watchers_of(llm).start(request_id, one.feed)


def _watchers_of(llm: Any) -> Watchers:
    client = llm.engine_core
    if client.watchers is None:
        limit = options_of(llm.vllm_config).canvas_watchers
        client.watchers = Watchers(llm.output_processor, limit)
    watchers: Watchers = client.watchers
    return watchers


class CanvasClient(AsyncMPClient):
    """Takes frames out of what arrives before metrics are updated: a frame is no first token.

    Where nobody watches, only traces arrive. A request's traces go with its outputs.
    """

    watchers: Watchers | None = None

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        if self.watchers is not None and has_frames(outputs.outputs):
            self.watchers.deliver(outputs)
        return outputs


class TracedState(RequestState):
    def _new_completion_output(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._new_completion_output(*args, **kwargs)
        if (trace := vars(self).get(TRACE_FIELD)) is not None:
            setattr(output, TRACE_FIELD, trace)
        return output


class TracedOutputs(OutputProcessor):
    """Also of an offline engine, where traces are the only frames."""

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        state = self.request_states.get(request.request_id)
        if state is not None and not isinstance(state, TracedState):
            self.request_states[request.request_id] = as_one_of(TracedState, state)

    def process_outputs(self, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if has_frames(engine_core_outputs):
            list(frames_taken(self, engine_core_outputs))
        return super().process_outputs(engine_core_outputs, *args, **kwargs)


def refuse_route(asked: str) -> NoReturn:
    """Refuse one of our fields on a route whose answers have no place for it."""
    how = ', with "stream": true' if asked == STREAM else ""
    refuse(
        asked,
        f"{asked} is not served here; allowed: /v1/chat/completions and /v1/completions{how}. "
        "Leave it out.",
    )


async def create_watched(create: Create, self: Any, request: Any, raw_request: Any) -> Any:
    """What ``create`` of ``self`` answers, with canvases and traces if they are asked for."""
    form = form_asked(request)
    if form is None and (request.vllm_xargs or {}).get(TRACE) in (None, False):
        return await create(request, raw_request)
    if form is not None:
        _refuse_what_is_not_shown(self, request, form)
    options = options_of(self.engine_client.vllm_config)
    watchers = _watchers_of(self.engine_client)
    feed = watchers.open(options.canvas_frames_per_s, form is not None, request.n or 1)
    if feed is None:
        return self.create_error_response(
            f"{options.canvas_watchers} canvas streams are open; more are not served. "
            f"Try again later, or leave {STREAM} out.",
            err_type="TooManyRequestsError",
            status_code=HTTPStatus.TOO_MANY_REQUESTS,
            param=STREAM,
        )
    one = current.get()
    assert one is not None, "its route handles it"
    one.feed, lines = feed, None
    try:
        lines = await create(request, raw_request)
    finally:
        one.feed = None  # tasks that were started meanwhile may start further requests
        feed.is_open = is_stream = hasattr(lines, "__anext__")
    if not is_stream:  # an answer, or an ErrorResponse
        _write_traces(lines, feed)
        return lines
    return interleaved(lines, feed, _writer(self, form, feed.request_id, request))


def _write_traces(answer: Any, feed: CanvasFeed) -> None:
    for choice in getattr(answer, "choices", ()):
        if choice.index in feed.traces:
            setattr(choice, TRACE_FIELD, feed.traces[choice.index])


def form_asked(request: Any) -> str | None:
    """How the client wants to see canvases; ``diffusing`` becomes ``diffusion_stream``."""
    if getattr(request, "diffusing", None) is True:
        request.vllm_xargs = {STREAM: "text", **(request.vllm_xargs or {})}
    form: str | None = (request.vllm_xargs or {}).get(STREAM)
    return form


def _refuse_what_is_not_shown(self: Any, request: Any, form: str) -> None:
    if not request.stream:
        refuse(STREAM, f'{STREAM} without "stream": true; allowed: with it. Send both, or none.')
    hides_reasoning = getattr(self, "parser_cls", None) is not None and not getattr(
        request, "include_reasoning", True
    )
    if hides_reasoning:
        refuse(
            STREAM,
            f'{STREAM} with "include_reasoning": false; canvases would show the reasoning. Leave '
            "one of them out.",
        )
    if form == "text" and getattr(request, "echo", False):
        refuse(
            STREAM,
            f'{STREAM} = "text" with echo; drafts hold no prompt, and each event replaces the one '
            "before. Leave one of them out.",
        )


def _writer(self: Any, form: str | None, request_id: str, request: Any) -> TraceWriter:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    is_chat = isinstance(self, OpenAIServingChat)
    stream = Stream(
        # A completion numbers the engine's requests, one for each prompt.
        request_id=request_id if is_chat else request_id.rpartition("-")[0],
        model=self.models.model_name(self.models.lora_requests.get(request.model)),
        is_chat=is_chat,
        stops=_stops(self.engine_client, request),
        tokenizer=self.renderer.get_tokenizer(),
    )
    if form is None:
        return TraceWriter(stream)
    return TextWriter(stream) if form == "text" else CanvasWriter(stream)


def _stops(llm: Any, request: Any) -> frozenset[int]:
    asked = request.stop_token_ids or ()
    if request.ignore_eos:
        return frozenset(asked)
    ends = llm.input_processor.generation_config_fields.get("eos_token_id") or []
    ends = [ends] if isinstance(ends, int) else ends
    return frozenset({*asked, *ends, llm.renderer.get_eos_token_id()} - {None})
