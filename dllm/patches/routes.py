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

from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from dllm import LOGGER
from dllm.api import fill, pins
from dllm.api.early_refusal import bound_bodies, bounded_type
from dllm.api.http_request import HttpRequest, current, handling, places_of
from dllm.api.page import CanvasPage
from dllm.models import AUTOREGRESSIVE, FAMILIES, settings_of
from dllm.patches.adapters import refuse_wrong_adapters
from dllm.patches.answers import read_token_by_token
from dllm.patches.streaming import Create, create_watched, form_asked, refuse_route
from dllm.patches.tool_calls import hold_tool_calls
from dllm.settings.admission import refuse_without_canvases
from dllm.settings.request import BUDGET, LOGITS_MODES, STREAM, TRACE, refuse

logger = init_logger(LOGGER)

# Fields of completions that cannot stand beside a suffix.
BESIDE_NO_SUFFIX = (
    "echo",
    "prompt_embeds",
    "use_beam_search",
    "response_format",
    "structured_outputs",
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
        setattr(route, method, _extended(route, getattr(route, method), take))
    refuse_wrong_adapters()
    _refuse_scores()
    _bound_invocations()


def _extended(
    route: type, create: Create, take: Callable[..., Awaitable[Any]] | None
) -> Callable[..., Any]:
    """A method of a route. It waits for grammars, and counts what its request starts.

    Args:
        take: calls ``create`` with what our fields ask for. None: the route refuses them.
    """

    async def create_extended(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture not in FAMILIES:
            if self.model_config.architecture in AUTOREGRESSIVE:
                await _refuse_fields_of_canvases(raw_request)
            return await create(self, request, raw_request)
        hold_tool_calls()
        read_token_by_token()
        one = HttpRequest(places_of(self.engine_client.vllm_config))
        if getattr(request, "tools", None) and not request.extract_structured_outputs():
            one.client_names["structured_outputs"] = "tools"
        with handling(one):
            try:
                # Subclasses (Anthropic, Cohere) call the chat's method and translate what it
                # streams. Our fields are refused for them.
                if take is not None and type(self) is route:
                    answer = await take(create, self, request, raw_request)
                else:
                    await _refuse_our_fields(request, raw_request)
                    _take_thinking(request, one)
                    answer = await create(self, request, raw_request)
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
    if raw_request is None:
        return
    sent = await raw_request.json()
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
    if sent.get(BUDGET) is not None and BUDGET not in type(request).model_fields:
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

    score = ServingGenerativeScoring.create_generative_scoring

    async def create_score(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture in FAMILIES:
            refuse(
                "label_token_ids",
                "/generative_scoring is not served for diffusion models: the probability of the "
                "next token depends on the noise of a canvas. Ask for prompt_logprobs.",
            )
        return await score(self, request, raw_request)

    ServingGenerativeScoring.create_generative_scoring = create_score  # type: ignore[method-assign]


def _bound_invocations() -> None:
    """Let ``/invocations``, which has validators of its own, read bodies with bounds."""
    from vllm.entrypoints.serve.sagemaker import api_router

    types = api_router.get_generate_invocation_types

    def bounded_types(supported_tasks: Any, model_config: Any = None) -> Any:
        given = types(supported_tasks, model_config)
        if model_config is None or model_config.architecture not in FAMILIES:
            return given
        return [(bounded_type(model), served) for model, served in given]

    api_router.get_generate_invocation_types = bounded_types


def _read_no_structural_tags() -> None:
    """Leave structural tags to the process that compiles them, which has limits (``grammar``).

    vLLM lets xgrammar read them on the event loop: 65 kB with ``minProperties`` take minutes.
    """
    from vllm.entrypoints.generate.base import protocol
    from vllm.exceptions import VLLMValidationError

    def is_text(payload: Any, *, parameter: str) -> None:
        if not isinstance(payload, str) or not payload:
            raise VLLMValidationError(f"{parameter}: no structural tag", parameter=parameter)

    protocol.validate_structural_tag_payload = is_text


async def _write_pins(self: Any, request: Any) -> None:
    given = getattr(request, pins.FIELD, None)
    if given is not None:
        canvas = self.engine_client.vllm_config.diffusion_config.canvas_length
        written = await _off_the_loop(self, pins.as_extra_args, given, _tokenizer(self), canvas)
        both = written.keys() & (request.vllm_xargs or {}).keys()
        if both:
            refuse(pins.FIELD, f"{pins.FIELD} beside {min(both)}; allowed: one. Leave one out.")
        request.vllm_xargs = {**(request.vllm_xargs or {}), **written}


async def _take_fill(self: Any, request: Any) -> fill.Fill:
    """Take the suffix out of a request of completions; vLLM refuses it for our models."""
    for field in (*BESIDE_NO_SUFFIX, pins.FIELD):
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
    given = (request.suffix, extra, _tokenizer(self), end, canvas, vocab_size)
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


def _tokenizer(self: Any) -> Any:
    return self.renderer.get_tokenizer()


class OurRoutes:
    """An endpoint plugin of vLLM: for our models, typed decisions, scores, bounds of all bodies."""

    name = "dllm_routes"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Remember the app, and let vLLM's own route read our families with our strategy."""
        from dllm.api.decisions.reads import CanvasReads  # imports vLLM's API server
        from dllm.settings.vllm_names import strategies

        class Reads(CanvasReads):
            def __init__(self, context: Any) -> None:
                super().__init__(context, settings_of(context.engine_client.vllm_config))

        self._app = app
        for architecture in FAMILIES:
            strategies.READ_STRATEGIES[architecture] = Reads

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Add ``/v1/decisions`` and ``/v1/scores``, and bound all bodies.

        vLLM's route of decisions takes as many options as ours. If the model cannot be asked, the
        routes say why.
        """
        from dllm.api import scores
        from dllm.api.decisions import reads, route
        from dllm.settings.vllm_names import question_types

        if not engine_client or engine_client.model_config.architecture not in FAMILIES:
            return
        question_types.QUESTION_TYPES["choice"] = reads.WideChoice()
        question_types.QUESTION_TYPES["score"] = reads.WideScore()
        route.attach(self._app)
        scores.attach(self._app, settings_of(engine_client.vllm_config))
        if getattr(state, "serving_structured_decisions", None) is None:
            logger.warning("/v1/decisions answers HTTP 501: %s", route.why_not(state))
        bound_bodies(self._app.routes)
        _read_no_structural_tags()


def add_endpoint_plugins() -> None:
    """Serve decisions, refuse wrong bodies early, serve ``/canvas`` if ``VLLM_PLUGINS`` names it.

    Entry points would do as well; but then vLLM would warn every user who does not set
    ``VLLM_PLUGINS``, whether they know of the page or not.
    """
    from vllm import envs, plugins

    load = plugins.load_endpoint_plugins

    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        loaded = load(supported_tasks)
        if "generate" in (supported_tasks or ()):
            loaded = [*loaded, OurRoutes()]
            if CanvasPage.name in (envs.VLLM_PLUGINS or ()):
                loaded.append(CanvasPage())
        return loaded

    plugins.load_endpoint_plugins = load_endpoint_plugins
