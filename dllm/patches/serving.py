"""Serving objects of ours, in the place of vLLM's, where one of our models is served.

A route of vLLM asks an object in the server's state, for each request. Ours has all that vLLM's has
been built with, and a class derived from vLLM's. What chats and completions take beside OpenAI's
fields (``patches.routes``), all other routes refuse.
"""

import asyncio
import copy
import json
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import from_json
from vllm.entrypoints.anthropic import api_router as messages
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.renderers.online_derenderer import OnlineDerenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.async_utils import make_async

from dllm.engine.derived import as_one_of, of_both
from dllm.patches.answers import parser_of, show_in_order
from dllm.patches.grammars import read_no_grammars
from dllm.patches.replace import replaces
from dllm.patches.routes import (
    allow_tools,
    answered,
    handled,
    read_as_openai_does,
    refuse_fields,
    refuse_fields_of_canvases,
    refuse_sent,
    take_messages,
    take_suffix,
    write_pins,
    write_untranslated,
)
from dllm.patches.streaming import create_watched
from dllm.settings.checks import did_you_mean
from dllm.settings.request import BUDGET, refuse

# What an error of Anthropic's API says of a thread; its SDK then sends whole messages without one.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
LONGEST_NAME = 1000  # of a model, in characters; nothing is served under a longer one


def explain_threads() -> None:
    @replaces(messages)
    def translate_error_response(theirs: Any, response: Any) -> Any:
        answer = theirs(response)
        if response.error.param != "thread":
            return answer
        content = json.loads(answer.body)
        content["error"]["details"] = NO_THREADS
        return JSONResponse(content, answer.status_code)


def serve_canvases(state: Any) -> None:
    show_in_order()
    read_no_grammars()
    renderer = state.online_renderer = taken_over(state.online_renderer, Renderer)
    state.online_derenderer = taken_over(state.online_derenderer, OnlineDerenderer)
    models = state.openai_serving_models
    if isinstance(models, OpenAIServingModels):  # of a server that only renders it is another
        models = state.openai_serving_models = taken_over(models, Models)
    objects = vars(state)["_state"]
    for name, theirs in objects.items():
        if isinstance(theirs, BaseServing):
            kind = Translating if name == COHERES else Ours
            ours = OURS.get(name) or of_both(kind, theirs.__class__)
            objects[name] = one = taken_over(theirs, ours)
            one.models = models
            if hasattr(one, "online_renderer"):
                one.online_renderer = renderer


def refuse_canvases(state: Any) -> None:
    """Let routes refuse fields of ours for a model that is served token by token."""

    def refusing(kind: type, method: str) -> type:
        async def refuse_and_create(self: Any, request: Any, raw_request: Any = None) -> Any:
            await refuse_fields_of_canvases(raw_request)
            return await getattr(super(ours, self), method)(request, raw_request)

        ours: type = type(kind.__name__, (kind,), {method: refuse_and_create})
        return ours

    for name, method in METHODS.items():
        if (theirs := getattr(state, name, None)) is not None:
            setattr(state, name, taken_over(theirs, refusing(type(theirs), method)))


def taken_over(theirs: Any, ours: type) -> Any:
    """Also its parsers are ours."""
    one = as_one_of(ours, theirs)
    for name in ("parser", "parser_cls"):
        if (parser := vars(one).get(name)) is not None:
            vars(one)[name] = parser_of(parser)
    return one


class Renderer(OnlineRenderer):
    async def preprocess_chat(self, request: Any, *args: Any, **options: Any) -> Any:
        """vLLM's reads tools on the event loop; what a thread has read, it reads no more."""
        parser = options.get("parser")
        if parser is not None and getattr(request, "tools", None):
            reader = parser(self.renderer.get_tokenizer(), request.tools)
            adjust = make_async(reader.adjust_request, self.renderer._executor)
            await adjust(copy.copy(request))
        return await super().preprocess_chat(request, *args, **options)


class Models(OpenAIServingModels):
    async def load_lora_adapter(self, *args: Any, **options: Any) -> Any:
        """Answer HTTP 400, not 500, if an adapter cannot be loaded."""
        answer = await super().load_lora_adapter(*args, **options)
        if (
            isinstance(answer, ErrorResponse)
            and answer.error.code == HTTPStatus.INTERNAL_SERVER_ERROR
            and not self.engine_client.errored
        ):
            answer.error.code = HTTPStatus.BAD_REQUEST.value
            answer.error.type = "BadRequestError"
        return answer


class Ours(BaseServing):
    async def _get_trace_headers(self, headers: Any) -> Any:
        """Let other requests run. vLLM's routes await this, and nothing else, between prompts."""
        await asyncio.sleep(0)
        return await super()._get_trace_headers(headers)

    async def _check_model(self, request: Any) -> Any:
        """Say which models and adapters are served where a request names another one; vLLM leaves
        out adapters, and writes ``<path>`` for a model that is called by its folder.
        """
        if request.model and len(request.model) > LONGEST_NAME:
            # What is searched for in it, here and in vLLM, would hold the server for seconds.
            request.model = f"{request.model[:LONGEST_NAME]}..."
        refused = await super()._check_model(request)
        if refused is not None and refused.error.code == HTTPStatus.NOT_FOUND:
            models = self.models
            names = [*(one.name for one in models.base_model_paths), *models.lora_requests]
            refused.error.message = (
                f"model = {request.model!r}{did_you_mean(request.model, names)}; allowed: "
                f"{', '.join(names)}."
            )
        return refused


class AnyChat(Ours, OpenAIServingChat):
    def _engine_reasoning_kwargs(
        self, request: Any, parser: Any, chat_template_kwargs: Any, prompt_token_ids: Any
    ) -> Any:
        """A thought that is not shown is one, too: vLLM would hold it to the answer's grammar."""
        shown = request.model_copy(update={"include_reasoning": True})
        return super()._engine_reasoning_kwargs(
            shown, parser, chat_template_kwargs, prompt_token_ids
        )

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        """Name the end as a stream does; vLLM says ``tool_calls`` of a call that was cut, too."""
        reasons: dict[int, str | None] = {}

        async def noted() -> Any:
            async for result in result_generator:
                reasons.update((one.index, one.finish_reason) for one in result.outputs)
                yield result

        answer: Any = await super().chat_completion_full_generator(
            request, noted(), *args, **options
        )
        for choice in getattr(answer, "choices", ()):
            has_called = reasons[choice.index] == "stop" and choice.message.tool_calls
            if choice.finish_reason == "tool_calls" and not has_called:
                choice.finish_reason = reasons[choice.index]
        return answer


class Chat(AnyChat):
    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        read_as_openai_does(request)
        create = super().create_chat_completion
        async with handled(self, request) as one:
            await write_pins(self, request)
            return await answered(one, request, create_watched(create, self, request, raw_request))


class Completion(Ours, OpenAIServingCompletion):
    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        create = super().create_completion
        async with handled(self, request) as one:
            await take_suffix(self, request, one)
            await write_pins(self, request)
            return await answered(one, request, create_watched(create, self, request, raw_request))


class Responses(Ours, OpenAIServingResponses):
    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request)
        allow_tools(request)
        async with handled(self, request) as one:
            return await answered(one, request, super().create_responses(request, raw_request))


class Batch(AnyChat, OpenAIServingChatBatch):
    async def create_batch_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request)
        async with handled(self, request) as one:
            return await answered(
                one, request, super().create_batch_chat_completion(request, raw_request)
            )


class Tokens(Ours, ServingTokens):
    async def serve_tokens(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request)
        async with handled(self, request) as one:
            return await answered(one, request, super().serve_tokens(request, raw_request))


class Translating(AnyChat):
    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """A chat that a route of another API has made, with the budget of its ``thinking``."""
        await refuse_fields(type(request), raw_request)
        async with handled(self, request) as one:
            one.client_names[BUDGET] = "thinking"
            return await answered(
                one, request, super().create_chat_completion(request, raw_request)
            )


class Messages(Translating, AnthropicServingMessages):
    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request, "seed")
        take_messages(request)
        return await super().create_messages(request, raw_request)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        await write_untranslated(request, raw_request)
        return await super().create_chat_completion(request, raw_request)

    def messages_full_converter(self, generator: Any) -> Any:
        """vLLM's, of calls that were cut, too: with the arguments that can be read."""
        (choice,) = generator.choices
        is_cut = False
        for call in choice.message.tool_calls:
            try:
                json.loads(call.function.arguments)
            except ValueError:
                is_cut = True
                read = from_json(call.function.arguments or "{}", allow_partial=True)
                call.function.arguments = json.dumps(read)
        answer: Any = super().messages_full_converter(generator)
        if is_cut and isinstance(choice.stop_reason, str):
            answer.stop_reason, answer.stop_sequence = "stop_sequence", choice.stop_reason
        return answer

    async def message_stream_converter(self, generator: Any) -> Any:
        """That of vLLM 0.32 cannot read a chat's event that is an error: it says what it says."""
        async for event in super().message_stream_converter(_errors_raised(generator)):
            yield event

    async def count_tokens(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(AnthropicMessagesRequest, raw_request, "seed")
        take_messages(request)
        return await super().count_tokens(request, raw_request)


async def _errors_raised(events: Any) -> Any:
    async for event in events:
        if isinstance(event, str) and event.startswith('data: {"error"'):
            raise RuntimeError(json.loads(event.removeprefix("data:"))["error"]["message"])
        yield event


class Scoring(Ours, ServingGenerativeScoring):
    async def create_generative_scoring(self, request: Any, raw_request: Any = None) -> Any:
        """The score of a label would depend on the noise that a canvas began with."""
        refuse(
            "label_token_ids",
            "/generative_scoring is not served for diffusion models: the probability of the next "
            "token depends on the noise of a canvas. Ask for prompt_logprobs.",
        )


class Render(Ours, ServingRender):
    """What it returns is for ``/inference/v1/generate``, which takes extra arguments alone."""

    async def render_chat_request(
        self, request: Any, raw_request: Any = None, *args: Any, **options: Any
    ) -> Any:
        await refuse_fields(type(request), raw_request)
        return await super().render_chat_request(request, raw_request, *args, **options)

    async def render_completion_request(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request)
        return await super().render_completion_request(request, raw_request)

    async def render_messages_request(self, request: Any, raw_request: Any = None) -> Any:
        await refuse_fields(type(request), raw_request)
        take_messages(request)
        return await super().render_messages_request(request, raw_request)

    async def render_responses_request(self, request: Any) -> Any:
        refuse_sent(type(request), vars(request) | (request.model_extra or {}))
        return await super().render_responses_request(request)


COHERES = "cohere_serving_chat_v2"
# By name in the server's state: the class of ours, and what a route calls.
OURS = {
    "openai_serving_chat": Chat,
    "openai_serving_chat_batch": Batch,
    "openai_serving_completion": Completion,
    "openai_serving_responses": Responses,
    "anthropic_serving_messages": Messages,
    "serving_tokens": Tokens,
    "serving_generative_scoring": Scoring,
    "serving_render": Render,
}
METHODS = {
    "openai_serving_chat": "create_chat_completion",
    "openai_serving_chat_batch": "create_batch_chat_completion",
    "openai_serving_completion": "create_completion",
    "openai_serving_responses": "create_responses",
    "anthropic_serving_messages": "create_chat_completion",
    COHERES: "create_chat_completion",
    "serving_tokens": "serve_tokens",
}
