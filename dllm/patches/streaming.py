"""Patches of the API server: unfinished canvases in the streams of chats and completions.

A route that can show canvases calls ``create_watched``, which says so in ``current_watch`` while
the request starts. Everywhere else ``diffusion_stream`` is refused.
"""

import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from dllm.api.events import CanvasWriter, Stream, TextWriter
from dllm.api.watching import Watch, Watchers, Writer, current_watch, has_frames, interleaved
from dllm.patches.contract import CPU_WORKER, GPU_WORKER
from dllm.settings.request import STREAM, refuse
from dllm.settings.server import PluginOptions

Create = Callable[[Any, Any, Any], Awaitable[Any]]  # a route's method: self, request, raw request


@dataclass
class Serving:
    """The watchers of one engine client, and the options of its server."""

    watchers: Watchers
    options: PluginOptions


_by_engine: weakref.WeakKeyDictionary[Any, Serving] = weakref.WeakKeyDictionary()
_by_client: weakref.WeakKeyDictionary[Any, Serving] = weakref.WeakKeyDictionary()
# Of API servers. An offline engine has one, too, but nobody who takes frames out of its outputs.
_online_processors: weakref.WeakSet[Any] = weakref.WeakSet()


def start_watching(llm: Any, params: Any, request_id: str) -> None:
    """Give a request that asks for its canvases to the stream of its route.

    Called before a request starts, with vLLM's ``AsyncLLM``.

    Raises:
        VLLMValidationError: no stream shows them.
    """
    if (params.extra_args or {}).get(STREAM) is None:
        return
    watch = current_watch.get()
    if watch is None or watch.feed is None:
        refuse_route()
    worker = llm.vllm_config.parallel_config.worker_cls
    if worker not in (CPU_WORKER, GPU_WORKER):  # nobody would take the frames
        refuse(STREAM, f"{STREAM} is not served with the worker {worker}. Leave it out.")
    watch.feed.request_id = watch.feed.request_id or request_id
    serving_of(llm).watchers.start(request_id, watch)


def serving_of(llm: Any) -> Serving:
    """The watchers of a server's engine client; made when it is asked for the first time."""
    if llm not in _by_engine:
        options = PluginOptions.from_vllm(llm.vllm_config)
        serving = Serving(Watchers(llm.output_processor, options.canvas_watchers), options)
        _by_engine[llm] = _by_client[llm.engine_core] = serving
        _online_processors.add(llm.input_processor)
    return _by_engine[llm]


def refuse_offline_streams(input_processor: Any, params: Any) -> None:
    """Refuse a request for canvases where there is no server.

    Raises:
        VLLMValidationError: the request asks for them.
    """
    if (params.extra_args or {}).get(STREAM) and input_processor not in _online_processors:
        refuse(STREAM, f"{STREAM} needs a server (vllm serve). Leave it out.")


def take_frames_out() -> None:
    """Take frames out of what arrives, before it changes metrics: a frame is no first token."""
    from vllm.v1.engine.core_client import AsyncMPClient

    get_output = AsyncMPClient.get_output_async

    async def get_output_async(self: Any) -> Any:
        outputs = await get_output(self)
        if has_frames(outputs):
            _by_client[self].watchers.deliver(outputs)
        return outputs

    AsyncMPClient.get_output_async = get_output_async  # type: ignore[method-assign]


def refuse_route() -> NoReturn:
    """Refuse a request whose route does not show canvases."""
    refuse(
        STREAM,
        f"{STREAM} is not served here; allowed: /v1/chat/completions and /v1/completions, with "
        '"stream": true. Leave it out.',
    )


async def create_watched(create: Create, self: Any, request: Any, raw_request: Any) -> Any:
    """What a route's method ``create`` returns, with canvases in the stream if it asks for them."""
    form = form_asked(request)
    if form is None:
        return await create(self, request, raw_request)
    _refuse_what_is_not_shown(self, request, form)
    serving = serving_of(self.engine_client)
    feed = serving.watchers.open(serving.options.canvas_frames_per_s)
    if feed is None:
        return self.create_error_response(
            f"{serving.options.canvas_watchers} canvas streams are open; more are not served. "
            f"Try again later, or leave {STREAM} out.",
            err_type="TooManyRequestsError",
            status_code=HTTPStatus.TOO_MANY_REQUESTS,
        )
    watch = Watch(feed, request.n or 1)
    token = current_watch.set(watch)
    lines = None
    try:
        lines = await create(self, request, raw_request)
    finally:
        current_watch.reset(token)
        watch.feed = None  # tasks that were started meanwhile keep a copy of the context
        feed.is_open = is_stream = hasattr(lines, "__anext__")
    if not is_stream:  # an ErrorResponse
        return lines
    return interleaved(lines, feed, _writer(self, form, feed.request_id, request))


def form_asked(request: Any) -> str | None:
    """How the client wants to see canvases; ``diffusing`` becomes ``diffusion_stream``."""
    if getattr(request, "diffusing", None) is True:
        request.vllm_xargs = {STREAM: "text", **(request.vllm_xargs or {})}
    form: str | None = (request.vllm_xargs or {}).get(STREAM)
    return form


def _refuse_what_is_not_shown(self: Any, request: Any, form: str) -> None:
    """Refuse a request whose canvases cannot be shown, or must not be."""
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


def _writer(self: Any, form: str, request_id: str, request: Any) -> Writer:
    """Writes the events of a stream of this route."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    is_chat = isinstance(self, OpenAIServingChat)
    stream = Stream(
        # A completion numbers the engine's requests, one for each prompt.
        request_id=request_id if is_chat else request_id.rpartition("-")[0],
        model=self.models.model_name(),
        is_chat=is_chat,
        stops=_stops(self.engine_client, request),
        tokenizer=self.renderer.get_tokenizer(),
    )
    return TextWriter(stream) if form == "text" else CanvasWriter(stream)


def _stops(llm: Any, request: Any) -> frozenset[int]:
    """The tokens that end an answer to this request."""
    asked = request.stop_token_ids or ()
    if request.ignore_eos:
        return frozenset(asked)
    ends = llm.input_processor.generation_config_fields.get("eos_token_id") or []
    ends = [ends] if isinstance(ends, int) else ends
    return frozenset({*asked, *ends, llm.renderer.get_eos_token_id()} - {None})
