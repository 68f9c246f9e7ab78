"""Routes that drop fields that they do not know refuse ours: those of a flag or a package."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from dllm.patches import install, routes, serving
from dllm.patches.served import Server
from dllm.patches.serving import Chat, Completion, Messages, Render, Tokens, Translating, taken_over
from tests.support.denoise_cases import CONFIG

install.install()


class CohereLike(Translating, OpenAIServingChat):
    """Translates what the chat's method answers; Cohere's needs a package that is not here."""

    def __init__(self) -> None:
        self.engine_client = SimpleNamespace(
            model_config=SimpleNamespace(logprobs_mode="raw_logits"),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=1),
                parallel_config=SimpleNamespace(data_parallel_size=1),
            ),
        )


def sent(body: dict[str, Any]) -> Any:
    async def json() -> dict[str, Any]:
        return body

    return SimpleNamespace(json=json)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"diffusion_pins": [{"at": 0, "text": "x"}]}, "diffusion_pins is not served here"),
        ({"diffusing": True}, "diffusion_stream is not served here"),
        ({"vllm_xargs": {"diffusion_stream": "text"}}, "diffusion_stream is not served here"),
        (
            {"vllm_xargs": {"a": 1}, "sampling_params": {"extra_args": {"diffusion_trace": True}}},
            "diffusion_trace is not served here",
        ),
    ],
)
@pytest.mark.parametrize(
    "method",
    [
        (Tokens, "serve_tokens"),
        (CohereLike, "create_chat_completion"),
        (Render, "render_chat_request"),
        (Render, "render_completion_request"),
        (Render, "render_messages_request"),
    ],
)
def test_our_fields_are_refused(method, body, message):
    route = taken_over(CohereLike(), method[0])
    asked = SimpleNamespace(model_fields={})
    with pytest.raises(VLLMValidationError, match=message):
        asyncio.run(getattr(route, method[1])(asked, sent(body)))


def test_coheres_chats_are_translated_and_no_others(monkeypatch):
    for patch in ("show_in_order", "read_no_grammars"):
        monkeypatch.setattr(serving, patch, lambda: None)
    names = (serving.COHERES, "serving_tokenization")
    objects = dict.fromkeys(
        ("online_renderer", "online_derenderer", "openai_serving_models"), SimpleNamespace()
    )
    objects |= {name: object.__new__(OpenAIServingChat) for name in names}
    serving.serve_canvases(State(objects))
    assert [isinstance(objects[name], Translating) for name in names] == [True, False]


def test_pins_are_refused_where_a_response_is_only_rendered():
    asked = ResponsesRequest(input="hi", diffusion_pins=[{"at": 0, "text": "x"}])
    with pytest.raises(VLLMValidationError, match="diffusion_pins is not served here"):
        asyncio.run(taken_over(CohereLike(), Render).render_responses_request(asked))


def test_holes_are_not_compared_by_logits(monkeypatch):
    monkeypatch.setattr("dllm.patches.routes.settings_of", lambda config: CONFIG)
    route = taken_over(CohereLike(), Completion)
    asked = SimpleNamespace(suffix="b", vllm_xargs=None)
    with pytest.raises(VLLMValidationError, match="--logprobs-mode"):
        asyncio.run(route.create_completion(asked, sent({})))


@pytest.mark.parametrize("reads_encodings", [False, True])
def test_no_prompt_carries_what_nobody_reads(reads_encodings):
    route = CohereLike()
    if reads_encodings:
        route.engine_client.vllm_config.ec_transfer_config = object()
    long = {"a": [[1]] * 1000}
    asked = SimpleNamespace(kv_transfer_params=long, ec_transfer_params=long)
    with pytest.raises(AttributeError):  # what is asked for it lacks all that vLLM reads
        asyncio.run(taken_over(route, Tokens).serve_tokens(asked))
    assert asked.kv_transfer_params is None
    assert asked.ec_transfer_params == (long if reads_encodings else None)


ANTHROPIC = [
    *({"logit_bias": {"1": 1}}, {"n": 2}, {"min_tokens": 1}, {"ignore_eos": True}),
    *({"bad_words": ["x"]}, {"structured_outputs": {"json": {}}}, {"stop": ["x"]}),
    *({"response_format": {"type": "json_object"}}, {"reasoning_effort": "high"}),
    {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    *({"thinking_token_budget": 16}, {"mcp_servers": [{}]}, {"parallel_tool_calls": False}),
    *({"compaction": {"type": "enabled"}}, {"thread": {"type": "continue"}}),
    {"output_format": {"type": "json_schema", "schema": {}}},
]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *((AnthropicMessagesRequest, field) for field in ANTHROPIC),
        (ResponsesRequest, {"conversation": "c"}),
    ],
)
def test_no_route_drops_what_changes_an_answer(kind, field):
    with pytest.raises(VLLMValidationError) as refused:
        asyncio.run(serving.refuse_fields(kind, sent(field)))
    assert refused.value.parameter == next(iter(field))


def test_anthropics_route_takes_what_changes_no_answer():
    body = {"metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {}, "user": "y"}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body |= {"n": 1, "stop": [], "mcp_servers": [], "context_management": edits}
    asyncio.run(serving.refuse_fields(AnthropicMessagesRequest, sent(body)))


def test_a_chat_is_read_as_openais_api_reads_it():
    """vLLM loses the call of a whole answer, and asks for logprobs of the prompt beside an echo."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = [{"role": "user", "content": "x"}]
    request = ChatCompletionRequest(messages=said, tools=tools, tool_choice=None, echo=True)
    routes.read_as_openai_does(request)
    assert request.tool_choice == "auto"
    assert request.to_sampling_params(5, {}).prompt_logprobs is None


FUNCTIONS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "weather")]


def allowing(*names: str) -> ResponsesRequest:
    tools = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    return ResponsesRequest(input="x", tools=FUNCTIONS, tool_choice=choice)


def test_a_response_has_the_tools_that_it_is_allowed():
    request = allowing("weather")
    routes.allow_tools(request)
    assert [tool.name for tool in request.tools] == ["weather"]
    assert request.tool_choice == "required"


@pytest.mark.parametrize("names", [(), ("none",), ("add", "none")])
def test_tools_that_are_not_there_cannot_be_allowed(names):
    with pytest.raises(VLLMValidationError) as refused:
        routes.allow_tools(allowing(*names))
    assert refused.value.parameter == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_anthropics_route_chooses_no_tool_where_there_is_none(choice):
    request = AnthropicMessagesRequest(
        model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}], tool_choice=choice
    )
    with pytest.raises(VLLMValidationError) as refused:
        routes.take_messages(request)
    assert refused.value.parameter == "tool_choice"


@pytest.mark.parametrize(("served", "kind"), [(Server.CANVASES, Chat), (None, None)])
def test_objects_of_other_models_stay_vllms(served, kind):
    """Also where vLLM has no endpoint plugins, as in ``vllm run-batch``."""
    from vllm.entrypoints.launchers.api_server.app_state import init_endpoint_plugins_state

    theirs, state = object.__new__(OpenAIServingChat), State()
    state.vllm_config = SimpleNamespace(served=served)
    state.online_renderer = object.__new__(serving.OnlineRenderer)
    state.online_derenderer = object.__new__(serving.OnlineDerenderer)
    state.openai_serving_models, state.openai_serving_chat = None, theirs
    asyncio.run(init_endpoint_plugins_state(None, state, None))
    assert type(state.openai_serving_chat) is (kind or OpenAIServingChat)
    assert (state.openai_serving_chat is theirs) is (kind is None)


def test_what_is_served_token_by_token_refuses_canvases():
    state = SimpleNamespace(openai_serving_chat=object.__new__(OpenAIServingChat))
    serving.refuse_canvases(state)
    with pytest.raises(VLLMValidationError) as refused:
        asyncio.run(state.openai_serving_chat.create_chat_completion(None, sent({"diffusing": 1})))
    assert refused.value.parameter == "diffusing"


def test_anthropics_streams_say_what_ended_an_answer():
    async def events() -> Any:
        message = CohereLike().create_streaming_error_response("not finite")
        stream = taken_over(CohereLike(), Messages).message_stream_converter(data(message))
        return [event async for event in stream]

    async def data(*messages: str) -> Any:
        for message in messages:
            yield f"data: {message}\n\n"

    (event,) = asyncio.run(events())
    assert event.startswith("event: error")
    assert json.loads(event.partition("data:")[2])["error"]["message"] == "not finite"
