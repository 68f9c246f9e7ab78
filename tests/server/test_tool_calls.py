"""Tool calls and thoughts over HTTP, with a model that has learned both."""

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from bench.toys.chat import TOOLS
from bench.toys.suite import Question, questions
from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, MODEL, ask_chat, serving

PARSERS = {"gemma": "gemma4", "hermes": "hermes"}
MARKS = {"gemma": (12, 13, 16), "hermes": (701, 702)}  # around calls, and Gemma's strings
FAMILIES = ("weather", "alarm", "phone")
STRICT = {
    name: tool | {"function": tool["function"] | {"strict": True}} for name, tool in TOOLS.items()
}
MAX_TOKENS = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["gemma", "hermes"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(style: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = (
        *COMMON_FLAGS,
        "--max-model-len=2048",
        "--enable-auto-tool-choice",
        f"--tool-call-parser={PARSERS[style]}",
        "--reasoning-parser=gemma4",
        f'--default-chat-template-kwargs={{"tool_style": "{style}"}}',
    )
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    for server in serving(CHECKPOINTS / "tiny-tools", tmp_path_factory, flags, stores):
        yield server.client()


def asked(style: str, is_listed: bool, count: int = 6) -> list[Question]:
    """Held-out questions of a style, with or without the tool that they need."""
    found = questions(FAMILIES, "heldout", 60)
    return [
        item
        for item in found
        if item.chat is not None
        and item.chat.tools
        and item.chat.style == style
        and ("I have no tool" not in item.answer) is is_listed
    ][:count]


def ask(client: openai.OpenAI, item: Question, **options: Any) -> Any:
    assert item.chat is not None
    thinking = options.pop("thinking", False)
    fields = {"return_token_ids": True, "thinking_token_budget": options.pop("budget", None)}
    fields["include_reasoning"] = options.pop("shows_thought", True)
    return ask_chat(
        client,
        item.prompt,
        tools=[STRICT[name] for name in item.chat.tools],
        max_tokens=options.pop("max_tokens", MAX_TOKENS),
        seed=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}, **fields},
        **options,
    )


def joined(stream: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and finish reason of a stream."""
    content = reasoning = reason = ""
    calls: dict[int, tuple[str, str]] = {}
    for part in stream:
        (choice,) = part.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            name += call.function.name or ""
            calls[call.index] = name, arguments + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    return content, reasoning, [*calls.values()], reason


def check(call: Any) -> dict[str, Any]:
    """The arguments of a call, which its schema allows."""
    function = getattr(call, "function", call)  # a response's call is its function
    arguments: dict[str, Any] = json.loads(function.arguments)
    jsonschema.validate(arguments, TOOLS[function.name]["function"]["parameters"])
    return arguments


@pytest.mark.parametrize("thinking", [False, True], ids=["at once", "behind a thought"])
def test_a_required_call_is_a_call_that_the_schema_allows(client, style, thinking):
    for item in asked(style, is_listed=True):
        (choice,) = ask(client, item, tool_choice="required", thinking=thinking).choices
        assert choice.finish_reason == "tool_calls"
        assert not (choice.message.content or "").strip()
        for call in choice.message.tool_calls:
            assert check(call) and call.function.name in item.chat.tools
        assert bool(choice.message.reasoning) is thinking


@pytest.mark.parametrize("name", TOOLS)
def test_a_named_tool_is_called_whatever_the_question(client, style, name):
    item = asked(style, is_listed=True)[0]
    choice = {"type": "function", "function": {"name": name}}
    options = {"tools": [*STRICT.values()], "tool_choice": choice, "max_tokens": MAX_TOKENS}
    answer = ask_chat(client, item.prompt, seed=1, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name and check(call)


def test_on_its_own_the_model_calls_or_says_that_it_cannot(client, style):
    called = 0
    for item in asked(style, is_listed=True):
        (choice,) = ask(client, item, tool_choice="auto").choices
        for call in choice.message.tool_calls or []:
            called += bool(check(call))
    assert called >= 4
    for item in asked(style, is_listed=False, count=3):
        (choice,) = ask(client, item, tool_choice="auto").choices
        assert choice.message.content == "I have no tool for that."
        assert not choice.message.tool_calls


def test_max_tokens_cuts_free_text_and_calls_in_it(client, style):
    for item in asked(style, is_listed=True)[:1] + asked(style, is_listed=False)[:1]:
        (choice,) = ask(client, item, tool_choice="auto", max_tokens=6).choices
        assert choice.finish_reason == "length" and len(choice.token_ids) == 6
        assert "call:" not in (choice.message.content or "")  # the mark stands in front of it
        *_, last = ask(client, item, tool_choice="auto", max_tokens=6, stream=True)
        assert last.choices[0].finish_reason == "length"


SHORT = {"thinking": True, "budget": 5}


@pytest.mark.parametrize(
    ("bias", "thought"),
    [(-100, {}), (-100, SHORT), (100, {})],
    ids=["unlikely", "unlikely behind a thought", "likely"],
)
def test_a_stream_has_the_same_calls(client, style, bias, thought):
    """Where the tokens that mark calls are unlikely, others could spell them."""
    item = asked(style, is_listed=True)[0]
    biased = {str(token): bias for token in MARKS[style]}
    options = thought | {"tool_choice": "required", "logit_bias": biased}
    (choice,) = ask(client, item, **options).choices
    (whole,) = choice.message.tool_calls
    content, _, [(name, arguments)], _ = joined(ask(client, item, stream=True, **options))
    assert not content.strip()
    assert (name, json.loads(arguments)) == (whole.function.name, check(whole))
    assert set(MARKS[style][:2]) <= set(choice.token_ids)


@pytest.mark.parametrize(
    "cut", [{"max_tokens": 8}, {"max_tokens": 5, "thinking": True}, {"stop": ["city", "e"]}]
)
def test_what_is_cut_is_the_same_whole_and_streamed(client, style, cut):
    """Finish reasons are OpenAI's: ``tool_calls`` of calls that came to their end."""
    item = asked(style, is_listed=True)[0]
    options = {"tool_choice": "required"} | cut
    (whole,) = ask(client, item, **options).choices
    said = whole.message
    made = [(call.function.name, call.function.arguments) for call in said.tool_calls or []]
    found = said.content or "", said.reasoning or "", made, whole.finish_reason
    assert joined(ask(client, item, stream=True, **options)) == found
    reason = "length" if "max_tokens" in cut else "tool_calls" if made else "stop"
    assert whole.finish_reason == reason


def test_a_thought_that_is_not_shown_is_no_part_of_the_call(client, style):
    item = asked(style, is_listed=True)[0]
    options = {"tool_choice": "required", "thinking": True}
    answers = [ask(client, item, shows_thought=shows, **options) for shows in (True, False)]
    shown, hidden = (answer.choices[0].message for answer in answers)
    assert shown.reasoning and not hidden.reasoning
    calls = [[call.function for call in one.tool_calls] for one in (shown, hidden)]
    assert calls[0] == calls[1] and not (hidden.content or "").strip()


def test_json_behind_a_thought(client):
    """The thought is free, the answer is held to its schema."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "adult": {"type": "boolean"}},
        "required": ["name", "adult"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    for seed in range(4):
        question = "Write name and adult as JSON: Ann is 33."
        options = {"max_tokens": 90, "seed": seed, "response_format": form}
        answer = ask_chat(client, question, extra_body=thinks, **options)
        message = answer.choices[0].message
        assert message.reasoning
        jsonschema.validate(json.loads(message.content), schema)


class Unit(enum.IntEnum):
    METRIC = 1
    IMPERIAL = 2


class Colour(enum.StrEnum):
    RED = "red"
    ONE = "1"


class Place(BaseModel):
    name: Literal["Rome", "1", "null"]
    unit: Unit


class Order(BaseModel):
    """Arguments, most of whose types are behind references."""

    unit: Unit
    colour: Colour | None
    place: Place
    places: list[Place]
    kind: Literal["1", 1, True, None]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_openais_sdk_reads_models_of_pydantic(client, streamed):
    """The arguments are not what the model has learned: what is read is what the grammar holds."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [openai.pydantic_function_tool(Order)],
        "tool_choice": "required",
        "max_tokens": 400,
        "seed": 1,
        "parallel_tool_calls": False,
    }
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.parse(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Order)


def test_tools_that_are_not_strict_are_named_and_never_refused(client, style):
    """The history calls a tool that is not declared; a call names the one that is."""
    odd = {"type": "object", "properties": {"a b": {"type": "string", "format": "uri"}, "c": False}}
    tool = {"type": "function", "function": {"name": "order", "parameters": odd}}
    item = asked(style, is_listed=True)[0]
    call = {"name": item.chat.tools[0], "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "user", "content": item.prompt},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "none"},
        {"role": "user", "content": item.prompt},
    ]
    for choice in ("auto", "required"):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], tool_choice=choice, max_tokens=60, seed=1
        )
        calls = answer.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= {"order"}
        assert calls or choice == "auto"


@pytest.mark.parametrize("what", ["unknown reference", "large"])
def test_a_schema_that_cannot_be_held_to_is_refused(client, what):
    schema = {"$ref": "#/$defs/none"}
    if what == "large":
        schema = {"type": "object", "properties": {"a": {"enum": ["x" * 60_000, "y" * 80_000]}}}
    function = {"name": "odd", "strict": True, "parameters": schema}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask_chat(client, "x", tools=tools, tool_choice="required", max_tokens=20)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("width", range(5, 13))
def test_a_streamed_response_has_the_calls_of_the_whole_one(client, style, width):
    """A canvas may hold the end of a call's arguments, and text behind them."""
    item = asked(style, is_listed=True)[0]
    asks: dict[str, Any] = {
        "model": MODEL,
        "input": f"{item.prompt} Then say it.",
        "tools": [{"type": "function", **STRICT[name]["function"]} for name in item.chat.tools],
        "max_output_tokens": 60,
        "extra_body": {"seed": 1, "vllm_xargs": {"diffusion_canvas_length": width}},
    }
    whole = client.responses.create(**asks)
    *_, last = client.responses.create(**asks, stream=True)
    assert last.type == "response.completed"
    calls = [
        [(one.name, one.arguments) for one in response.output if one.type == "function_call"]
        for response in (whole, last.response)
    ]
    assert calls[0] == calls[1]
    if whole.status == "completed":  # or the last call may be cut
        assert all(check(one) for one in whole.output if one.type == "function_call")


def test_a_response_in_the_background_is_streamed(client):
    asks = {"model": MODEL, "input": "What is 34 + 5?", "max_output_tokens": 20, "temperature": 0.0}
    whole = client.responses.create(**asks)
    *_, last = client.responses.create(**asks, background=True, stream=True)
    assert last.response.output_text == whole.output_text
    assert client.responses.retrieve(last.response.id).output_text == whole.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
def test_a_custom_tool_gets_a_text(client, choice):
    tool = {"type": "custom", "name": "apply_patch", "description": "Apply a patch."}
    asks: dict[str, Any] = {
        "model": MODEL,
        "input": "What is 34 + 5?",
        "tools": [tool],
        "tool_choice": choice,
        "max_output_tokens": 60,
        "extra_body": {"seed": 1},
    }
    (call,) = client.responses.create(**asks).output
    *_, last = client.responses.create(**asks, stream=True)
    (streamed,) = last.response.output
    assert call.type == streamed.type == "custom_tool_call"
    assert call.input == streamed.input and not call.input.startswith("{")


TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ENABLED = {"type": "enabled", "budget_tokens": 1024}
THINKING = [None, ENABLED, {"type": "adaptive"}, {"type": "disabled"}]
USES = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
TURNS = [
    {"role": "user", "content": "What is 34 + 5?"},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "I call it.", "signature": "abc"}, USES],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "1",
                "content": "39",
                "cache_control": {"type": "ephemeral"},
            }
        ],
    },
]


@pytest.fixture
def claude(client: openai.OpenAI) -> anthropic.Anthropic:
    url = str(client.base_url).removesuffix("v1/")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.mark.parametrize("thinking", THINKING)
def test_tokens_are_counted_as_they_are_used(claude, thinking):
    """With a system text, tools, and thoughts that were returned."""
    given: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    for tools in ({}, {"tools": [TOOL]}):
        for messages in (TURNS[:1], TURNS):
            asks = given | tools | {"model": MODEL, "messages": messages, "system": "Be brief."}
            counted = claude.messages.count_tokens(**asks).input_tokens
            answer = claude.messages.create(**asks, max_tokens=1100, metadata={"user_id": "x"})
            assert counted == answer.usage.input_tokens


def test_adaptive_thinks_as_enabled_does(claude):
    """And shows no thought where that is asked for."""
    common = {"model": MODEL, "messages": TURNS[:1], "max_tokens": 1100, "extra_body": {"seed": 1}}
    enabled, adaptive = (
        claude.messages.create(**common, thinking=one).content for one in THINKING[1:3]
    )
    assert adaptive[0].type == "thinking"
    assert [one.model_dump(exclude={"signature"}) for one in adaptive] == [
        one.model_dump(exclude={"signature"}) for one in enabled
    ]
    hidden = claude.messages.create(**common, thinking={"type": "adaptive", "display": "omitted"})
    assert [one.type for one in hidden.content] == [one.type for one in adaptive[1:]]


def test_anthropics_loop_goes_on_without_a_thread(claude, style):
    """Its SDK asks for one, and is refused in the way that it knows."""
    called = []

    @anthropic.beta_tool(strict=True)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    first, *_ = claude.beta.messages.tool_runner(
        model=MODEL,
        messages=[{"role": "user", "content": asked(style, is_listed=True)[0].prompt}],
        tools=[get_weather],
        tool_choice={"type": "any"},
        max_tokens=60,
        max_iterations=2,
        extra_body={"seed": 1},
    )
    assert first.stop_reason == "tool_use" and called


@pytest.mark.parametrize("by_stop", [False, True])
def test_a_use_of_a_tool_that_is_cut_has_the_input_that_can_be_read(claude, style, by_stop):
    tool = TOOLS["get_weather"]["function"]
    asks: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": asked(style, is_listed=True)[0].prompt}],
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}],
        "tool_choice": {"type": "any"},
        "extra_body": {"seed": 1},
    }
    shorter = {"gemma": 6, "hermes": 12}[style]  # than the call
    cut = {"stop_sequences": ["city"], "max_tokens": 60} if by_stop else {"max_tokens": shorter}
    asks |= cut
    whole = claude.messages.create(**asks)
    with claude.messages.stream(**asks) as stream:
        streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason
    assert by_stop or whole.stop_reason == "max_tokens"
    used = [
        [(one.name, one.input) for one in said.content if one.type == "tool_use"]
        for said in (whole, streamed)
    ]
    assert used[0] == used[1] != []


@pytest.mark.parametrize("thinking", THINKING)
def test_events_come_in_anthropics_order(claude, style, thinking):
    item = asked(style, is_listed=True)[0]
    tools = [STRICT[name]["function"] for name in item.chat.tools]
    given: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    stream = claude.messages.create(
        **given,
        model=MODEL,
        messages=[{"role": "user", "content": item.prompt}],
        tools=[{"name": one["name"], "input_schema": one["parameters"]} for one in tools],
        max_tokens=1100,
        stream=True,
        extra_body={"seed": 1},
    )
    parts = "content_block_start( content_block_delta)*( content_block_stop)"
    order = f"message_start( {parts})+ message_delta message_stop"
    events = [*stream]
    assert re.fullmatch(order, " ".join(event.type for event in events))
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert starts == [*range(len(starts))]
