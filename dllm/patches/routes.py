"""Patches of vLLM's routes: what chats and completions take beside OpenAI's fields.

diffusion_pins    given tokens, by text                      (api.pins)
suffix            fill in the middle, of completions         (api.fill)
diffusion_stream  unfinished canvases in the stream          (patches.streaming)
diffusion_trace   when each token was decided                (patches.streaming)

`thinking` of Anthropic's route turns thoughts on, and is named where its budget is refused.
"""

from collections.abc import Awaitable, Callable
from types import AsyncGeneratorType
from typing import Any

from vllm.utils.async_utils import make_async

from dllm.api import fill, pins
from dllm.api.http_request import HttpRequest, current, handling, places_of
from dllm.models import AUTOREGRESSIVE, FAMILIES
from dllm.patches.adapters import refuse_wrong_adapters
from dllm.patches.answers import read_token_by_token
from dllm.patches.replace import replaces
from dllm.patches.streaming import Create, create_watched, form_asked, refuse_route
from dllm.patches.tool_calls import hold_tool_calls
from dllm.settings.admission import refuse_without_canvases
from dllm.settings.request import BUDGET, LOGITS_MODES, STREAM, TRACE, refuse

# Fields of completions that cannot stand beside a suffix.
BESIDE_NO_SUFFIX = (
    *("echo", "prompt_embeds", "use_beam_search", "response_format", "structured_outputs"),
    pins.FIELD,
)


def extend_routes() -> None:
    """Let chats and completions take our fields; all other routes that answer refuse them."""
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    for route, take, method in (
        (OpenAIServingChat, _create_chat, "create_chat_completion"),
        (OpenAIServingCompletion, _create_completion, "create_completion"),
        (OpenAIServingResponses, None, "create_responses"),
        (OpenAIServingChatBatch, None, "create_batch_chat_completion"),
        (ServingTokens, None, "serve_tokens"),
    ):
        replaces(route, method)(_extended(route, take))
    refuse_wrong_adapters()
    _refuse_scores()
    _refuse_our_fields_of_rendering()


def _extended(route: type, take: Callable[..., Awaitable[Any]] | None) -> Callable[..., Any]:
    """A method of a route. It waits for grammars, and counts what its request starts.

    Args:
        take: calls vLLM's method with what our fields ask for. None: the route refuses them.
    """

    async def create_extended(
        theirs: Create, self: Any, request: Any, raw_request: Any = None
    ) -> Any:
        if self.model_config.architecture not in FAMILIES:
            if self.model_config.architecture in AUTOREGRESSIVE:
                await _refuse_fields_of_canvases(raw_request)
            return await theirs(self, request, raw_request)
        hold_tool_calls()
        read_token_by_token()
        _leave_out_transfers(self, request)
        one = HttpRequest(places_of(self.engine_client.vllm_config))
        if "messages" in getattr(type(request), "model_fields", ()):
            one.client_names["prompt"] = "messages"
        if getattr(request, "tools", None) and not request.extract_structured_outputs():
            one.client_names["structured_outputs"] = "tools"
        with handling(one):
            try:
                # Subclasses (Anthropic, Cohere) call the chat's method and translate what it
                # streams. Our fields are refused for them.
                if take is not None and type(self) is route:
                    answer = await take(theirs, self, request, raw_request)
                else:
                    await _refuse_our_fields(request, raw_request)
                    _take_thinking(request, one)
                    answer = await theirs(self, request, raw_request)
            except RecursionError:
                # vLLM reads the arguments of an earlier tool call as JSON.
                refuse("messages", "a message is nested too deeply. Make it flatter.")
            if isinstance(answer, AsyncGeneratorType):
                if _is_response_with_format(request):
                    answer = await _begun(answer, one)
                for compilation in one.compilations:
                    await compilation()
        return answer

    return create_extended


def _leave_out_transfers(self: Any, request: Any) -> None:
    """Drop what nobody reads: it may be as long as a body, and each prompt would carry a copy.

    KV transfer is refused at start (``configure``).
    """
    if getattr(request, "kv_transfer_params", None) is not None:
        request.kv_transfer_params = None
    is_read = getattr(self.engine_client.vllm_config, "ec_transfer_config", None) is not None
    if not is_read and getattr(request, "ec_transfer_params", None) is not None:
        request.ec_transfer_params = None


def _take_thinking(request: Any, one: HttpRequest) -> None:
    """Let a chat that Anthropic's route has made think, if ``thinking`` has a budget.

    vLLM's route translates the budget alone. Whether the model thinks is for its chat template.
    """
    if getattr(request, BUDGET, None) is not None:
        given = request.chat_template_kwargs or {}
        request.chat_template_kwargs = {"enable_thinking": True, **given}
        one.client_names[BUDGET] = "thinking"


async def _create_chat(create: Create, self: Any, request: Any, raw_request: Any) -> Any:
    await _write_pins(self, request)
    return await create_watched(create, self, request, raw_request)


async def _create_completion(create: Create, self: Any, request: Any, raw_request: Any) -> Any:
    """A completion, with pins; if it has a suffix, the hole in front of that is filled."""
    if not request.suffix:
        request.suffix = None  # vLLM would refuse an empty one
        _refuse_hole_without_suffix(request)
        return await _create_chat(create, self, request, raw_request)
    one = current.get()
    assert one is not None, "its route handles it"
    one.hole = await _take_fill(self, request)
    return await _create_chat(create, self, request, raw_request)


def _is_response_with_format(request: Any) -> bool:
    return getattr(getattr(request, "text", None), "format", None) is not None or (
        hasattr(request, "text") and bool(request.tools)
    )


async def _begun(stream: Any, one: HttpRequest) -> Any:
    """The same stream, which has asked the engine: the Responses API sends events before."""
    events: list[Any] = []
    while one.num_requests == 0:
        try:
            events.append(await anext(stream))
        except StopAsyncIteration:
            break

    async def whole() -> Any:
        for event in events:
            yield event
        async for event in stream:
            yield event

    return whole()


async def _refuse_our_fields(request: Any, raw_request: Any) -> None:
    """Refuse our fields where nothing behind the route could.

    Responses start their stream before the request, and other routes drop the fields that they do
    not know.
    """
    if raw_request is not None:
        _refuse_fields(type(request), await raw_request.json())


def _refuse_fields(body: Any, sent: dict[str, Any]) -> None:
    """Refuse our fields.

    Args:
        body: what vLLM has read the request as; it reads our budget, or not.
        sent: the request, by the names of its fields.
    """
    params = sent.get("sampling_params")  # of /inference/v1/generate
    of_tokens = params.get("extra_args") if isinstance(params, dict) else None
    given = [each for each in (sent.get("vllm_xargs"), of_tokens) if isinstance(each, dict)]
    extra = {key for each in given for key in each}
    if sent.get("diffusing") is True or STREAM in extra:
        refuse_route(STREAM)
    if TRACE in extra:
        refuse_route(TRACE)
    if sent.get(pins.FIELD) is not None:
        refuse_route(pins.FIELD)
    if sent.get(BUDGET) is not None and BUDGET not in body.model_fields:
        refuse(BUDGET, f"{BUDGET} is not read here. Send it within vllm_xargs.")


async def _refuse_fields_of_canvases(raw_request: Any) -> None:
    sent = await raw_request.json() if raw_request is not None else {}
    for field in ("diffusing", pins.FIELD):
        if sent.get(field):
            refuse_without_canvases(field)


def _refuse_scores() -> None:
    """Refuse ``/generative_scoring``: a canvas says nothing about the next token alone.

    The score of a label would depend on the noise that the canvas began with.
    """
    from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring

    @replaces(ServingGenerativeScoring)
    async def create_generative_scoring(
        theirs: Any, self: Any, request: Any, raw_request: Any = None
    ) -> Any:
        if self.model_config.architecture in FAMILIES:
            refuse(
                "label_token_ids",
                "/generative_scoring is not served for diffusion models: the probability of the "
                "next token depends on the noise of a canvas. Ask for prompt_logprobs.",
            )
        return await theirs(self, request, raw_request)


def _refuse_our_fields_of_rendering() -> None:
    """Let ``.../render`` refuse our fields: what it returns is for ``/inference/v1/generate``.

    That route takes extra arguments alone, in ``sampling_params``.
    """
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    for method in (
        "render_chat_request",
        "render_completion_request",
        "render_messages_request",
        "render_responses_request",
    ):

        @replaces(ServingRender, method)
        async def render_allowed(
            theirs: Any, self: Any, request: Any, *args: Any, **options: Any
        ) -> Any:
            if self.model_config.architecture in FAMILIES:
                raw_request = args[0] if args else options.get("raw_request")
                if raw_request is not None:
                    sent = await raw_request.json()
                else:  # of responses, vLLM gives none
                    sent = vars(request) | (request.model_extra or {})
                _refuse_fields(type(request), sent)
            return await theirs(self, request, *args, **options)


async def _write_pins(self: Any, request: Any) -> None:
    given = getattr(request, pins.FIELD, None)
    if given is not None:
        canvas = self.engine_client.vllm_config.diffusion_config.canvas_length
        parts = given, self.renderer.get_tokenizer(), canvas
        written = await _off_the_loop(self, pins.as_extra_args, *parts)
        both = written.keys() & (request.vllm_xargs or {}).keys()
        if both:
            refuse(pins.FIELD, f"{pins.FIELD} beside {min(both)}; allowed: one. Leave one out.")
        request.vllm_xargs = {**(request.vllm_xargs or {}), **written}


async def _take_fill(self: Any, request: Any) -> fill.Fill:
    """Take the suffix out of a request of completions; vLLM refuses it for our models."""
    for field in BESIDE_NO_SUFFIX:
        if getattr(request, field, None):
            fill.refuse_beside_suffix(field)
    if form_asked(request) is not None:
        fill.refuse_beside_suffix(STREAM)
    if TRACE in (request.vllm_xargs or ()):
        fill.refuse_beside_suffix(TRACE)
    llm, extra = self.engine_client, request.vllm_xargs or {}
    if llm.model_config.logprobs_mode in LOGITS_MODES:
        refuse(
            "suffix",
            "suffix: holes are compared by log-probabilities, and --logprobs-mode is of logits. "
            "Leave it out.",
        )
    canvas = llm.vllm_config.diffusion_config.canvas_length
    end = llm.renderer.get_eos_token_id()
    vocab_size = llm.model_config.get_vocab_size()
    given = (request.suffix, extra, self.renderer.get_tokenizer(), end, canvas, vocab_size)
    hole: fill.Fill = await _off_the_loop(self, fill.fill_of, *given)
    request.suffix = None
    request.vllm_xargs = {k: v for k, v in extra.items() if k not in (fill.WIDTHS, fill.END)}
    return hole


def _refuse_hole_without_suffix(request: Any) -> None:
    for key in (fill.WIDTHS, fill.END):
        if key in (request.vllm_xargs or {}):
            refuse(key, f"{key} without suffix; allowed: beside it. Send both, or omit both.")


async def _off_the_loop(self: Any, tokenize: Callable[..., Any], *args: Any) -> Any:
    """Run a function that tokenizes on the threads where vLLM tokenizes prompts."""
    return await make_async(tokenize, self.renderer._executor)(*args)
