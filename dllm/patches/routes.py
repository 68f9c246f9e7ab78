"""Patches of the routes of chats and completions: what they take beside OpenAI's fields.

diffusion_pins    given tokens, by text                      (api.pins)
suffix            fill in the middle, of completions         (api.fill)
diffusion_stream  unfinished canvases in the stream          (patches.streaming)
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from dllm.api import fill, pins
from dllm.api.page import CanvasPage
from dllm.models import FAMILIES
from dllm.patches.streaming import Create, create_watched, form_asked, refuse_route
from dllm.settings.request import refuse


def extend_routes() -> None:
    """Let chats and completions take our fields; Responses refuse them."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    # Subclasses (Anthropic, Cohere) call the chat's method and translate what it streams, so only
    # the class itself is extended.
    OpenAIServingChat.create_chat_completion = _extended(  # type: ignore[method-assign]
        OpenAIServingChat, OpenAIServingChat.create_chat_completion
    )
    OpenAIServingCompletion.create_completion = _extended(  # type: ignore[method-assign]
        OpenAIServingCompletion, OpenAIServingCompletion.create_completion
    )
    OpenAIServingResponses.create_responses = _refusing(  # type: ignore[method-assign]
        OpenAIServingResponses.create_responses
    )


def _extended(served: type, create: Create) -> Callable[..., Any]:
    """The method of a route, which takes our fields."""

    async def create_extended(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture not in FAMILIES or type(self) is not served:
            return await create(self, request, raw_request)
        _write_pins(self, request)
        suffix = getattr(request, "suffix", None)
        if suffix == "":
            request.suffix = None  # vLLM would refuse it
        if not suffix:
            return await create_watched(create, self, request, raw_request)
        token = fill.current_fill.set(_take_fill(self, request))
        try:
            return await create(self, request, raw_request)
        finally:
            fill.current_fill.reset(token)

    return create_extended


def _refusing(create: Create) -> Callable[..., Any]:
    """A route's method that refuses at once; Responses start their stream before the request."""

    async def create_plain(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture in FAMILIES:
            if form_asked(request) is not None:
                refuse_route()
            if getattr(request, pins.FIELD, None) is not None:
                _refuse_pins()
        return await create(self, request, raw_request)

    return create_plain


def start_fill(
    llm: Any, generate: Any, prompt: Any, params: Any, *args: Any, **options: Any
) -> Any:
    """The outputs of a request that a route with a suffix starts; None for every other request.

    Args:
        llm: vLLM's AsyncLLM, and ``generate`` its method, with the arguments that follow.

    Raises:
        VLLMValidationError: hole and suffix do not fit.
    """
    hole = fill.current_fill.get()
    if hole is None:
        return None
    room = llm.model_config.max_model_len - len(prompt["prompt_token_ids"])
    widths = hole.width_range(params.max_tokens, room)
    candidate = hole.candidate(params, widths[-1], 0)
    llm.input_processor._validate_params(candidate, ("generate",))
    start = functools.partial(generate, llm)
    return fill.filled(start, hole, widths, prompt, params, *args, **options)


def _write_pins(self: Any, request: Any) -> None:
    """Turn ``diffusion_pins`` into extra arguments."""
    given = getattr(request, pins.FIELD, None)
    if given is not None:
        written = pins.as_extra_args(given, _encoder(self))
        both = written.keys() & (request.vllm_xargs or {}).keys()
        if both:
            refuse(pins.FIELD, f"{pins.FIELD} beside {min(both)}; allowed: one. Leave one out.")
        request.vllm_xargs = {**(request.vllm_xargs or {}), **written}


def _take_fill(self: Any, request: Any) -> fill.Fill:
    """Take the suffix out of a request of completions; vLLM refuses it for our models."""
    for field in ("echo", "prompt_embeds", "use_beam_search"):
        if getattr(request, field):
            refuse("suffix", f"suffix beside {field}; allowed: one of them. Leave one out.")
    llm, extra = self.engine_client, request.vllm_xargs or {}
    canvas = llm.vllm_config.diffusion_config.canvas_length
    end = llm.renderer.get_eos_token_id()
    hole = fill.fill_of(request.suffix, extra, _encoder(self), end, canvas)
    request.suffix = None
    request.vllm_xargs = {k: v for k, v in extra.items() if k not in (fill.WIDTHS, fill.END)}
    return hole


def _encoder(self: Any) -> Callable[[str], list[int]]:
    encode: Callable[..., list[int]] = self.renderer.get_tokenizer().encode
    return functools.partial(encode, add_special_tokens=False)


def _refuse_pins() -> NoReturn:
    refuse(
        pins.FIELD,
        f"{pins.FIELD} is not served here; allowed: /v1/chat/completions and /v1/completions. "
        "Leave it out.",
    )


def offer_page() -> None:
    """Serve ``/canvas`` where ``VLLM_PLUGINS`` names ``dllm_canvas``.

    An entry point would do as well; but then vLLM would warn every user who does not set
    ``VLLM_PLUGINS``, whether they know of the page or not.
    """
    from vllm import envs, plugins

    load = plugins.load_endpoint_plugins

    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        loaded = load(supported_tasks)
        is_served = set(CanvasPage.required_tasks) & set(supported_tasks or ())
        if is_served and CanvasPage.name in (envs.VLLM_PLUGINS or ()):
            loaded = [*loaded, CanvasPage()]
        return loaded

    plugins.load_endpoint_plugins = load_endpoint_plugins
