"""Answers read in parts of any width, or as one, beside vLLM's own reading of the whole."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.parser.parser_manager import ParserManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from dllm.patches.answers import parser_of, show_in_order

TOKENIZER = AutoTokenizer.from_pretrained("checkpoints/tiny-tools")
TOKENIZER.add_tokens(["<think>", "</think>"])
GEMMA, QWEN = ("<|channel>", "<channel|>"), ("<think>", "</think>")
CALLS = {
    "gemma4": '<|tool_call>call:t0{a:<|"|>x < y<|"|>,b:{c:[1,2]}}<tool_call|>',
    "hermes": '<tool_call>\n{"name": "t0", "arguments": {"a": "x < y", "b": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=t0>\n<parameter=a>\nx < y\n</parameter>\n</function>\n"
    "</tool_call>",
}
# (reasoning parser, marks of its thoughts, whether there may be several, tool parser)
PARSERS = [
    ("gemma4", GEMMA, True, "gemma4"),
    ("gemma4", GEMMA, True, "hermes"),
    ("gemma4", GEMMA, True, None),
    (None, GEMMA, True, "gemma4"),
    ("qwen3", QWEN, False, "hermes"),
    ("qwen3", QWEN, False, "qwen3_coder"),
    ("nemotron_v3", QWEN, False, "qwen3_coder"),
    ("deepseek_r1", QWEN, False, "hermes"),
    (None, QWEN, False, "hermes"),
]
WORDS = ("The sum", " is 8 < 9", "\n", " ", "<|", "<tool", "é 日本 🎉", "call:")

show_in_order()


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 4)))


def answer(rng: random.Random, marks: tuple[str, str], several: bool, call: str | None) -> str:
    """Thoughts and texts, and calls behind them: a whole answer shows no text behind a call."""
    begin, end = marks
    thought = f"{begin}thought\n{words(rng)}.{end}" if several else f"{words(rng)}.{end}"
    texts = [
        rng.choice([f"{words(rng)}.", thought][: 1 + several]) for _ in range(rng.randint(0, 4))
    ]
    calls = [call] * rng.randint(0, 2) if call is not None else []
    return "".join([rng.choice([thought, ""] if several else [thought]), *texts, *calls])


def parts_of(tokens: list[int], rng: random.Random) -> Any:
    """The tokens in parts of random widths, with the texts that vLLM has by then."""
    stop = rng.choice([[], ["never written"]])  # what could be its beginning comes later
    asked: Any = SimpleNamespace(
        sampling_params=SamplingParams(skip_special_tokens=False, stop=stop),
        prompt_token_ids=[2],
        prompt_embeds=None,
        request_id="",
    )
    detokenizer = IncrementalDetokenizer.from_new_request(TOKENIZER, asked)
    at = 0
    while at < len(tokens):
        width = rng.choice([1, 2, 3, 8, 32])
        part = tokens[at : at + width]
        at += width
        detokenizer.update(part, False)
        yield detokenizer.get_next_output_text(at >= len(tokens), True), part, at >= len(tokens)


def in_parts(tokens: list[int], width: int) -> Any:
    """Texts, tokens, and whether they are the last."""
    for at in range(0, len(tokens), width):
        part = tokens[at : at + width]
        yield TOKENIZER.decode(part), part, at + width >= len(tokens)


def asked(**options: Any) -> ChatCompletionRequest:
    """A request with a tool, which is not strict."""
    function = {"name": "t0", "parameters": {"type": "object", "properties": {}}}
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": function}],
        skip_special_tokens=False,
        **options,
    )


def streamed(parser: Any, request: Any, parts: Any) -> dict[str, Any]:
    """What a new parser reads of ``parts_of`` or ``in_parts``."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}}
    for text, part, is_last in parts:
        delta = parser.parse_delta(text, part, request, [2], finished=is_last)
        found["reasoning"] += (delta and delta.reasoning) or ""
        found["content"] += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            name, arguments = found["calls"].setdefault(call.index, ("", ""))
            found["calls"][call.index] = (
                name + (call.function.name or ""),
                arguments + (call.function.arguments or ""),
            )
    return found


@pytest.mark.parametrize(("reasoning", "marks", "several", "tool"), PARSERS)
def test_a_stream_reads_what_the_whole_answer_says(reasoning, marks, several, tool):
    theirs = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True)
    make = parser_of(theirs)
    # vLLM guesses the types of arguments in Gemma's form.
    whole = make if tool == "gemma4" else theirs
    request = asked(tool_choice="auto")
    for seed in range(30):
        rng = random.Random(seed)
        text = answer(rng, marks, several, CALLS.get(tool))
        tokens = TOKENIZER.encode(text, add_special_tokens=False) + [1] * (not text)
        thought, content, calls = whole(TOKENIZER, request.tools).parse(
            TOKENIZER.decode(tokens), request, enable_auto_tools=tool is not None
        )
        found = streamed(make(TOKENIZER, request.tools), request, parts_of(tokens, rng))
        made = [(name, json.loads(inside)) for name, inside in found["calls"].values()]
        shown = found["content"].strip() if made else found["content"]
        got = found["reasoning"], shown, made
        content = (content or "") if not calls else (content or "").strip()
        want = thought or "", content, [(c.name, json.loads(c.arguments)) for c in calls or ()]
        assert got == want, text


@pytest.mark.parametrize("tool", CALLS)
def test_of_a_call_that_is_cut_is_read_what_was_written(tool):
    make = parser_of(ParserManager.get_parser(tool, "gemma4", enable_auto_tools=True))
    request, tokens = asked(), TOKENIZER.encode(CALLS[tool], add_special_tokens=False)
    called = 0
    for count in range(1, len(tokens)):
        text, read = TOKENIZER.decode(tokens[:count]), make(TOKENIZER, request.tools)
        _, content, calls = read.parse(text, request, True, tokens[:count])
        called += bool(calls)
        assert not content and all("t0".startswith(call.name) for call in calls or ())
    assert called > len(tokens) / 2


@pytest.mark.parametrize("width", [1, 40])
def test_a_thought_that_is_cut_keeps_its_spaces(width):
    make = parser_of(ParserManager.get_parser(None, "gemma4"))
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    tokens = TOKENIZER.encode("<|channel>thought\nI call", add_special_tokens=False)
    found = streamed(make(TOKENIZER, []), request, in_parts(tokens, width))
    assert found["reasoning"] == "I call"


@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("tool", CALLS)
@pytest.mark.parametrize("tools", [[], [{"type": "function", "name": "t0", "parameters": {}}]])
def test_a_call_that_is_not_allowed_is_text(tools, tool, width):
    make = parser_of(ParserManager.get_parser(tool, "gemma4", enable_auto_tools=True))
    choice = "none" if tools else "auto"
    request = ResponsesRequest(
        input="x", tools=tools, tool_choice=choice, skip_special_tokens=False
    )
    written = f"So:{CALLS[tool]} <|tool"
    tokens = TOKENIZER.encode(written, add_special_tokens=False)
    found = streamed(make(TOKENIZER, request.tools), request, in_parts(tokens, width))
    assert found == {"reasoning": "", "content": written, "calls": {}}


THOUGHT = "<|channel>thought\nWhy not.<channel|>"
CALL = CALLS["gemma4"]


def events_of(deltas: list[Any]) -> list[tuple[str, str]]:
    """The items that the Responses API makes of messages: kind and text, or arguments."""
    processor = SimpleStreamingEventProcessor()
    for delta in filter(None, deltas):
        for one in serving.split_delta(delta):
            state, call = processor.resolve_target_state(one)
            if processor.needs_transition(state, call):
                processor.close_current()
                processor.open(state, call)
            output: Any = None
            processor.emit_delta(one, output)
    processor.close_current()
    items: list[Any] = processor.output_items
    return [
        (i.type, i.arguments if i.type == "function_call" else i.content[0].text) for i in items
    ]


@pytest.mark.parametrize("text", [CALL + "7.", f"One.{CALL}two.{CALL}{CALL}3.", THOUGHT + CALL])
def test_responses_have_the_same_items_whatever_the_parts(text):
    make = parser_of(ParserManager.get_parser("gemma4", "gemma4", enable_auto_tools=True))
    tool = {"type": "function", "name": "t0", "parameters": {"type": "object"}, "strict": False}
    request = ResponsesRequest(input="x", tools=[tool], skip_special_tokens=False)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    read = {}
    for width in range(1, len(tokens) + 1):
        parser, deltas = make(TOKENIZER, request.tools), []
        for piece, part, is_last in in_parts(tokens, width):
            deltas.append(parser.parse_delta(piece, part, request, [2], finished=is_last))
        read[width] = events_of(deltas)
    assert len(read[1]) == text.count("call:") + text.count(".")
    assert all(items == read[1] for items in read.values())


@pytest.mark.parametrize("tool", ["qwen3_coder", "hermes"])
def test_a_required_array_of_calls_is_read_in_parts(tool, monkeypatch):
    """As it is with VLLM_ENFORCE_STRICT_TOOL_CALLING=0."""
    make = parser_of(ParserManager.get_parser(tool, None, enable_auto_tools=True))
    monkeypatch.setattr(make.tool_parser_cls, "supports_required_and_named", True)
    request = asked(tool_choice="required")
    text = '[{"name": "t0", "parameters": {"a": 1}}, {"name": "t0", "parameters": {}}]'
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for width in (1, 3, 7, len(tokens)):
        found = streamed(make(TOKENIZER, request.tools), request, in_parts(tokens, width))
        assert [*found["calls"].values()] == [("t0", '{"a": 1}'), ("t0", "{}")]
