"""Patches of the routes of chats and completions: what they take beside OpenAI's fields.

diffusion_pins    given tokens, by text                      (api.pins)
suffix            fill in the middle, of completions         (api.fill)
diffusion_stream  unfinished canvases in the stream          (patches.streaming)
diffusion_trace   when each token was decided                (patches.streaming)
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.utils.async_utils import make_async

from dllm import LOGGER
from dllm.api import fill, pins
from dllm.api.early_refusal import bound_bodies, bounded_type
from dllm.api.page import CanvasPage
from dllm.api.tally import Tally, current_tally
from dllm.models import AUTOREGRESSIVE, FAMILIES, settings_of
from dllm.patches.adapters import refuse_wrong_adapters
from dllm.patches.streaming import Create, create_watched, form_asked, refuse_route
from dllm.settings.admission import refuse_without_canvases
from dllm.settings.denoising import block_size_of
from dllm.settings.request import STREAM, TRACE, refuse

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

    # Subclasses (Anthropic, Cohere) call the chat's method and translate what it streams, so only
    # the class itself is extended, and for them the method refuses.
    OpenAIServingChat.create_chat_completion = _counting(  # type: ignore[method-assign]
        _extended(OpenAIServingChat, OpenAIServingChat.create_chat_completion)
    )
    OpenAIServingCompletion.create_completion = _counting(  # type: ignore[method-assign]
        _filling(_extended(OpenAIServingCompletion, OpenAIServingCompletion.create_completion))
    )
    for route, method in (
        (OpenAIServingResponses, "create_responses"),
        (OpenAIServingChatBatch, "create_batch_chat_completion"),
        (ServingTokens, "serve_tokens"),
    ):
        setattr(route, method, _counting(_refusing(getattr(route, method))))
    refuse_wrong_adapters()
    _refuse_scores()
    _bound_invocations()


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


def _counting(create: Create) -> Callable[..., Any]:
    """A route's method, with a count of what its request starts."""

    async def create_counted(self: Any, request: Any, raw_request: Any = None) -> Any:
        token = current_tally.set(Tally())
        try:
            return await create(self, request, raw_request)
        except RecursionError:  # the arguments of an earlier tool call, which vLLM reads as JSON
            if self.model_config.architecture not in FAMILIES:
                raise
            refuse("messages", "a message is nested too deeply. Make it flatter.")
        finally:
            current_tally.reset(token)

    return create_counted


def count(number: int, num_samples: int) -> None:
    """Count requests of the engine that the current HTTP request starts, for each sample.

    Raises:
        VLLMValidationError: there are too many.
    """
    tally = current_tally.get()
    if tally is not None:
        tally.add(number * num_samples, "n" if num_samples > 1 else "prompt")


def _extended(served: type, create: Create) -> Callable[..., Any]:
    """The method of a route, which takes pins, and shows canvases."""
    refusing = _refusing(create)

    async def create_extended(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture not in FAMILIES or type(self) is not served:
            return await refusing(self, request, raw_request)
        await _write_pins(self, request)
        return await create_watched(create, self, request, raw_request)

    return create_extended


def _filling(create: Create) -> Callable[..., Any]:
    """The method of completions, which takes a suffix."""

    async def create_filling(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture not in FAMILIES:
            return await create(self, request, raw_request)
        if not request.suffix:
            request.suffix = None  # vLLM would refuse an empty one
            _refuse_hole_without_suffix(request)
            return await create(self, request, raw_request)
        token = fill.current_fill.set(await _take_fill(self, request))
        try:
            return await create(self, request, raw_request)
        finally:
            fill.current_fill.reset(token)

    return create_filling


def _refusing(create: Create) -> Callable[..., Any]:
    """A route's method that refuses our fields.

    Responses start their stream before the request, and other routes drop the fields that they do
    not know, so that nothing behind them could refuse.
    """

    async def create_plain(self: Any, request: Any, raw_request: Any = None) -> Any:
        if self.model_config.architecture in FAMILIES and raw_request is not None:
            sent = await raw_request.json()
            extra = sent.get("vllm_xargs") or ()
            if sent.get("diffusing") is True or STREAM in extra:
                refuse_route(STREAM)
            if TRACE in extra:
                refuse_route(TRACE)
            if sent.get(pins.FIELD) is not None:
                _refuse_pins()
        elif self.model_config.architecture in AUTOREGRESSIVE and raw_request is not None:
            sent = await raw_request.json()
            for field in ("diffusing", pins.FIELD):
                if sent.get(field):
                    refuse_without_canvases(field)
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
    prompt_len = len(prompt["prompt_token_ids"])
    if (block := block_size_of(llm.vllm_config)) > 1:
        one_step = settings_of(llm.vllm_config).one_step
        hole = replace(hole, canvas_width=block - prompt_len % block, one_step=one_step)
    room = llm.model_config.max_model_len - prompt_len
    widths = hole.width_range(params.min_tokens, params.max_tokens, room)
    count(len(widths), params.n)
    candidate = hole.candidate(params, widths[-1], 0)
    llm.input_processor._validate_params(candidate, ("generate",))
    start = functools.partial(generate, llm)
    decode = functools.partial(
        llm.renderer.get_tokenizer().decode, skip_special_tokens=params.skip_special_tokens
    )
    return fill.filled(start, hole, widths, decode, prompt, params, *args, **options)


async def _write_pins(self: Any, request: Any) -> None:
    """Turn ``diffusion_pins`` into extra arguments."""
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
    """The result of a function that tokenizes, on the threads where vLLM tokenizes prompts."""
    return await make_async(tokenize, self.renderer._executor)(*args)


def _tokenizer(self: Any) -> Any:
    return self.renderer.get_tokenizer()


def _refuse_pins() -> NoReturn:
    refuse(
        pins.FIELD,
        f"{pins.FIELD} is not served here; allowed: /v1/chat/completions and /v1/completions. "
        "Leave it out.",
    )


class OurRoutes:
    """An endpoint plugin of vLLM: for our models, typed decisions, scores, bounds of all bodies."""

    name = "dllm_routes"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Remember the app, and let vLLM's own route read our families with our strategy."""
        from vllm.entrypoints.generate.structured_decisions.strategies import READ_STRATEGIES

        from dllm.api.decisions.reads import CanvasReads  # imports vLLM's API server

        self._app = app
        for architecture in FAMILIES:
            READ_STRATEGIES[architecture] = CanvasReads

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Add ``/v1/decisions`` and ``/v1/scores``, and bound all bodies.

        vLLM's route of decisions takes as many options as ours.

        Says why, if the model cannot be asked.
        """
        from vllm.entrypoints.generate.structured_decisions.question_types import QUESTION_TYPES

        from dllm.api import scores
        from dllm.api.decisions import reads, route

        if not engine_client or engine_client.model_config.architecture not in FAMILIES:
            return
        QUESTION_TYPES["choice"] = reads.WideChoice()
        QUESTION_TYPES["score"] = reads.WideScore()
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
