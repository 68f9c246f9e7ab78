"""What chats and completions take beside OpenAI's fields, and what all routes do with a request.

diffusion_pins    given tokens, by text                      (api.pins)
suffix            fill in the middle, of completions         (api.fill)
diffusion_stream  unfinished canvases in the stream          (patches.streaming)
diffusion_trace   when each token was decided                (patches.streaming)

``patches.serving`` calls this, where vLLM's routes ask for an answer. `thinking` of Anthropic's
route turns thoughts on, and is named where its budget is refused.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from types import AsyncGeneratorType
from typing import Any

from openai.types.responses import ToolChoiceAllowed
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.utils.async_utils import make_async

from dllm.api import fill, pins
from dllm.api.engine_requests import places_of
from dllm.api.http_request import HttpRequest, handling
from dllm.models import settings_of
from dllm.patches.streaming import form_asked, refuse_route
from dllm.settings.admission import refuse_beams, refuse_without_canvases
from dllm.settings.denoising import WHOLE_SEQUENCE
from dllm.settings.request import BUDGET, LOGITS_MODES, STREAM, TRACE, refuse, refuse_value

# Fields of completions that cannot stand beside a suffix.
BESIDE_NO_SUFFIX = (
    *("echo", "prompt_embeds", "use_beam_search", "response_format", "structured_outputs"),
    pins.FIELD,
)
# How many tokens an answer may have, in each route that has such a field.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Of chats: fields that cannot change an answer. Other routes may drop them.
CHANGE_NO_ANSWER = (
    *("user", "request_id", "session_id", "priority", "stream_options", "stream_interval"),
    *("mm_payload", "return_mm_kwargs", "routed_experts_prompt_start"),
)
# Of Anthropic's and OpenAI's APIs: what changes an answer, and vLLM's routes drop; their defaults.
EDITS = "context_management"  # of what the model is shown of earlier turns
DROPPED: dict[str, Any] = {
    **dict.fromkeys(("container", EDITS, "compaction", "thread", "output_format", "conversation")),
    "mcp_servers": [],
}
OPTION = "diffusion_"  # how the names of our options begin
PROMPT = (
    "prompt_token_ids"  # of ``kv_transfer_params``: the prompt, which vLLM then does not render
)


@asynccontextmanager
async def handled(self: Any, request: Any) -> AsyncIterator[HttpRequest]:
    """Around what a route does: what its request starts is counted. At its end is `answered`."""
    if getattr(request, "use_beam_search", False):
        refuse_beams()
    _refuse_misplaced(getattr(request, "model_extra", None) or {})
    _leave_out_transfers(self, request)
    _choose_length(self, request)
    one = HttpRequest(places_of(self.engine_client.vllm_config))
    if "messages" in getattr(type(request), "model_fields", ()):
        one.client_names["prompt"] = "messages"
    if getattr(request, "tools", None) and not request.extract_structured_outputs():
        one.client_names["structured_outputs"] = "tools"
    with handling(one):
        try:
            yield one
        except RecursionError:
            # vLLM reads the arguments of an earlier tool call as JSON.
            refuse("messages", "a message is nested too deeply. Make it flatter.")


async def answered(one: HttpRequest, request: Any, answering: Awaitable[Any]) -> Any:
    """The answer; of a stream when its grammars are compiled, before its first byte."""
    answer = await answering
    if isinstance(answer, AsyncGeneratorType):
        if isinstance(request, ResponsesRequest):
            answer = await _begun(answer, one)
        for compilation in one.compilations:
            await compilation()
    return answer


def _refuse_misplaced(sent: dict[str, Any], *others: str) -> None:
    """Refuse options, and ``others``, beside OpenAI's fields, where vLLM would drop them."""
    for name, value in sent.items():
        is_ours = name.startswith(OPTION) and name != pins.FIELD
        if (is_ours or name in others) and value is not None:
            refuse(name, f"{name} is not read here. Send it within vllm_xargs.")


def _leave_out_transfers(self: Any, request: Any) -> None:
    """Drop what nobody reads: it may be as long as a body, and each prompt would carry a copy.

    vLLM takes a prompt's tokens out of its fields.
    """
    if isinstance(given := getattr(request, "kv_transfer_params", None), dict):
        tokens = given.get(PROMPT)
        request.kv_transfer_params = None if tokens is None else {PROMPT: tokens}
    is_read = getattr(self.engine_client.vllm_config, "ec_transfer_config", None) is not None
    if not is_read and getattr(request, "ec_transfer_params", None) is not None:
        request.ec_transfer_params = None


def _choose_length(self: Any, request: Any) -> None:
    """Of an answer whose canvas is all that is left of it: vLLM's choice is the whole context."""
    settings = settings_of(self.engine_client.vllm_config)
    if settings.block_size != WHOLE_SEQUENCE:
        return
    given = vars(request)  # reading the deprecated one from the request itself would warn
    names = [name for name in LENGTHS if name in given]
    if names and all(given[name] is None for name in names):
        setattr(request, names[-1], settings.canvas_length)


def allow_tools(request: Any) -> None:
    """Leave a response the tools that it is allowed; vLLM reads ``allowed_tools`` and drops it."""
    choice = request.tool_choice
    if not isinstance(choice, ToolChoiceAllowed):
        return
    allowed = {one.get("name") for one in choice.tools}
    known = {name: tool for tool in request.tools if (name := getattr(tool, "name", None))}
    if not allowed or not allowed <= known.keys():
        allowed_here = f"allowed_tools of {[*known]}"
        refuse_value("tool_choice", choice.tools, allowed_here, "Name some of them.")
    request.tools = [tool for name, tool in known.items() if name in allowed]
    request.tool_choice = choice.mode


def take_messages(request: Any) -> None:
    """What vLLM's translation of Anthropic's API leaves out: whether to think, is for a template.

    Raises VLLMValidationError for a choice of tools that are not there.
    """
    choice = request.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not request.tools:
        refuse("tool_choice", f"tool_choice {choice.type!r} without tools. Send some, or omit it.")
    if request.thinking is not None and request.thinking.type != "disabled":
        given = request.chat_template_kwargs or {}
        request.chat_template_kwargs = {"enable_thinking": True, **given}


def read_as_openai_does(request: Any) -> None:
    if request.tools and request.tool_choice is None:
        request.tool_choice = "auto"  # vLLM would read no call of a whole answer
    if request.echo and not request.logprobs:
        request.top_logprobs = None  # vLLM would ask for those of the prompt


async def take_suffix(self: Any, request: Any, one: HttpRequest) -> None:
    """Of a completion, which vLLM refuses for our models."""
    if request.suffix:
        one.hole = await _take_fill(self, request)
        return
    request.suffix = None  # vLLM would refuse an empty one
    for key in (fill.WIDTHS, fill.END):
        if key in (request.vllm_xargs or {}):
            refuse(key, f"{key} without suffix; allowed: beside it. Send both, or omit both.")


async def _begun(stream: Any, one: HttpRequest) -> Any:
    """The same stream, which has asked the engine: the Responses API sends events before."""
    events: list[Any] = []
    await asyncio.sleep(0)  # a response in the background is known when its task has begun
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


async def refuse_fields(body: Any, raw_request: Any, *held: str) -> None:
    """As ``refuse_sent``; None, as from a file of requests: nothing."""
    if raw_request is not None:
        refuse_sent(body, await raw_request.json(), *held)


async def write_untranslated(chat: Any, raw_request: Any) -> None:
    """Into the chat that vLLM has made of Anthropic's request: the seed, and thoughts not shown."""
    sent = await raw_request.json() if raw_request is not None else {}
    seed = sent.get("seed")
    if seed is not None and type(seed) is not int:
        refuse_value("seed", seed, "an integer", "Send one, or omit it.")
    chat.seed = seed
    chat.include_reasoning = (sent.get("thinking") or {}).get("display") != "omitted"


def refuse_sent(body: Any, sent: dict[str, Any], *held: str) -> None:
    """Refuse our fields where nothing behind the route could, and what vLLM's route drops.

    ``body``: the class that vLLM reads the request as. ``held``: fields that are held, though that
    class has none of them.
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
    _refuse_misplaced(sent, *{BUDGET}.difference(body.model_fields))
    for name, default in _of_chats_alone(body).items():
        is_left_out = name in held or sent.get(name) in (None, default)
        if not is_left_out and not (name == EDITS and _keeps_all(sent[name])):
            refuse(name, f"{name} is not read here. Leave it out, or ask another route.")


@cache
def _of_chats_alone(body: Any) -> dict[str, Any]:
    """Fields that change an answer and that ``body`` does not read; their defaults."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    known = {*body.model_fields, *CHANGE_NO_ANSWER}
    fields = {
        name: field.get_default(call_default_factory=True)
        for name, field in ChatCompletionRequest.model_fields.items()
        if name not in known
    }
    return fields | DROPPED


def _keeps_all(management: Any) -> bool:
    """Whether edits leave all earlier turns as they are; agents send such ones of thoughts."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


async def refuse_fields_of_canvases(raw_request: Any) -> None:
    sent = await raw_request.json() if raw_request is not None else {}
    for field in ("diffusing", pins.FIELD):
        if sent.get(field):
            refuse_without_canvases(field)


async def write_pins(self: Any, request: Any) -> None:
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


async def _off_the_loop(self: Any, tokenize: Callable[..., Any], *args: Any) -> Any:
    """Run a function that tokenizes on the threads where vLLM tokenizes prompts."""
    return await make_async(tokenize, self.renderer._executor)(*args)
