"""Tool calls in an API server: drawn from the grammar, read by vLLM's parser, judged by others."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager

from dllm.grammar.children import Children
from dllm.grammar.compile import Grammars, Spec, Tokens
from dllm.grammar.lowering import lower
from dllm.grammar.refusals import Unsupported
from dllm.grammar.table import Table
from dllm.patches.answers import parser_of, show_in_order
from tests.support.grammars import VOCABULARY, WORDS, accepts
from tests.support.patience import HANG_S
from tests.support.tool_schemas import random_text, tool_schema

TOKENIZER = AutoTokenizer.from_pretrained("checkpoints/tiny-tools")
NUM_TEXTS = 12
# What Gemma's syntax has no room for, or no texts as short as the tests draw.
ODD = {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}, "b:c": {}}}
CALLS = {
    "gemma4": "<|tool_call>call:{name}{{a:1}}<tool_call|>",
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={name}>\n<parameter=a>\n1\n</parameter>\n</function>"
    "\n</tool_call>",
}

show_in_order()


@pytest.fixture(scope="module")
def grammars():
    children = Children(VOCABULARY, seconds=HANG_S)
    yield Grammars(lambda: Tokens(list(WORDS), {}), children=children)
    children.close()


def table_of(asked: Any, grammars: Grammars) -> Table:
    kind = "structural_tag" if asked.structural_tag else "json"
    spec = Spec(kind, asked.structural_tag or json.dumps(lower(asked.json).schema()))
    return Table.from_bytes(grammars.begin(spec, []).result())


class Asked:
    """A request with tools, as a server has it: with a structural tag, and a parser of answers.

    Args:
        tools: whether they are strict, and schemas of their arguments; called t0, t1 and so on.
    """

    def __init__(self, parser: str, tools: list[tuple[bool | None, Any]], choice: Any) -> None:
        named = enumerate(tools)
        functions = [{"name": f"t{n}", "parameters": p, "strict": s} for n, (s, p) in named]
        self._make = parser_of(ParserManager.get_parser(parser, enable_auto_tools=True))
        self._fields = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice,
        }
        self._request = ChatCompletionRequest(**self._fields)
        self.request = self._parser().adjust_request(ChatCompletionRequest(**self._fields))

    def _parser(self) -> Any:
        return self._make(TOKENIZER, self._request.tools)

    def table(self, grammars: Grammars) -> Table:
        return table_of(self.request.structured_outputs, grammars)

    def calls(self, text: str) -> list[tuple[str, Any]]:
        """Names and arguments in an answer; streamed in pieces they are the same."""
        _, _, calls = self._parser().parse(text, self._request, enable_auto_tools=True)
        streamed: dict[int, list[str]] = {}
        parser = self._parser()
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        for number, piece in enumerate(pieces, 1):
            is_last = number == len(pieces)
            delta = parser.parse_delta(piece, [], self._request, [], finished=is_last)
            for call in (delta and delta.tool_calls) or ():
                parts = streamed.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
        whole = [(call.name, json.loads(call.arguments)) for call in calls or ()]
        assert [(name, json.loads(inside)) for name, inside in streamed.values()] == whole
        return whole


@pytest.mark.parametrize("parser", ["gemma4", "hermes"])
@pytest.mark.parametrize("seeds", [range(6), range(6, 200)], ids=["some", "200"])
def test_arguments_of_strict_tools_are_what_their_schemas_allow(grammars, parser, seeds):
    """Also where a string could be taken for another type: ``"1"`` beside 1."""
    for seed in seeds:
        schema = tool_schema(random.Random(seed))
        asked, draws = Asked(parser, [(True, schema)], "required"), np.random.default_rng(seed)
        found = asked.table(grammars)
        for _ in range(NUM_TEXTS):
            text = random_text(found, draws)
            calls = asked.calls(text)
            assert calls, text
            for name, arguments in calls:
                assert name == "t0"
                jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parser", CALLS)
def test_other_tools_are_held_to_their_names_alone(grammars, parser, choice):
    """Also beside a strict one; whatever their schemas say."""
    strict = {"type": "object", "properties": {}, "additionalProperties": False}
    for tools in ([(None, ODD), (False, ODD)], [(False, ODD), (None, ODD), (True, strict)]):
        found = Asked(parser, tools, choice).table(grammars)
        assert accepts(found, CALLS[parser].format(name="t0"))
        assert accepts(found, CALLS[parser].format(name="t1"))
        assert not accepts(found, CALLS[parser].format(name="t2"))
        assert accepts(found, "Hello < there") is (choice == "auto")
        no_object = CALLS["hermes"].format(name="t0").replace('{"a": 1}', "1")
        assert parser != "hermes" or not accepts(found, no_object)
        assert parser != "qwen3_coder" or len(found.accepts) < 1000  # any text has room for values


def test_any_arguments_in_gemmas_form_are_read(grammars):
    asked = Asked("gemma4", [(None, ODD)], "required")
    found, draws, read = asked.table(grammars), np.random.default_rng(1), []
    for _ in range(6):
        read += asked.calls(random_text(found, draws))
    assert len(read) >= 6 and {name for name, _ in read} == {"t0"}
    text = '<|tool_call>call:t0{a b:[{c:<|"|>1</a><|"|>}],d:-0.5,e:null,f:1e999}<tool_call|>'
    arguments = {"a b": [{"c": "1</a>"}], "d": -0.5, "e": None, "f": "1e999"}
    assert asked.calls(text) == [("t0", arguments)]


@pytest.mark.parametrize("name", ["tool_call", "longcat_tool_call"])
def test_an_argument_may_hold_the_text_that_ends_a_call(grammars, name):
    """Ordinary tokens can spell it; also cut in pieces, behind escapes, and in a second call."""
    parser = {"tool_call": "hermes", "longcat_tool_call": "longcat"}[name]
    asked = Asked(parser, [(None, ODD), (None, ODD)], "auto")
    end, text, given = f"</{name}>", "", []
    for number, inside in enumerate((f"a {end} b", f'"{end}', f"<{end}{end}", f"\\{end}", "<")):
        arguments = {"a": inside, inside: [1]}
        given.append((f"t{number % 2}", arguments))
        call = f'{{"name": "t{number % 2}", "arguments": {json.dumps(arguments)}}}'
        text += f"<{name}>\n{call}\n{end}"
    assert accepts(asked.table(grammars), text)
    assert asked.calls(text) == given


def test_what_is_no_call_is_returned_as_it_was_written():
    text = '<tool_call>{"name": "</tool_call>, 5'
    parser = parser_of(ParserManager.get_parser("hermes", enable_auto_tools=True))(TOKENIZER, [])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    _, content, calls = parser.parse(text, request, enable_auto_tools=True)
    assert (content, calls or []) == (text, [])


@pytest.mark.parametrize("parser", ["gemma4", "qwen3_coder"])
def test_text_behind_a_call_is_in_whole_and_streamed_answers(parser):
    asked = Asked(parser, [(None, {"type": "object"})], "auto")
    text = CALLS[parser].format(name="t0") + "It is done."
    _, content, calls = asked._parser().parse(text, asked._request, enable_auto_tools=True)
    assert content == "It is done." and len(calls) == 1
    reader = asked._parser()
    parts = [reader.parse_delta(c, [], asked._request, [], finished=False) for c in text]
    parts.append(reader.parse_delta("", [], asked._request, [], finished=True))
    assert "".join(part.content or "" for part in parts if part) == content


NAMED = {"type": "custom", "name": "patch"}
HERMES = '<tool_call>\n{"name": "patch", "arguments": {*}}\n</tool_call>'


@pytest.mark.parametrize(
    ("parser", "choice", "call"),
    [
        ("gemma4", "auto", "<|tool_call>call:patch{*}<tool_call|>"),
        ("gemma4", "required", "<|tool_call>call:patch{*}<tool_call|>"),
        ("gemma4", NAMED, "<|tool_call>call:patch{*}<tool_call|>"),
        ("hermes", "auto", HERMES),
        ("hermes", NAMED, HERMES),
        ("granite4", "required", '[{"name": "patch", "parameters": {*}}]'),
        ("granite4", NAMED, "{*}"),
    ],
)
def test_a_custom_tool_is_given_one_text(grammars, parser, choice, call):
    request = ResponsesRequest(input="x", tools=[NAMED], tool_choice=choice)
    make = parser_of(ParserManager.get_parser(parser, enable_auto_tools=True))
    asked = make(TOKENIZER, request.tools).adjust_request(request)
    found = table_of(asked.extract_structured_outputs(), grammars)
    name, text = ("input", '<|"|>a<|"|>') if parser == "gemma4" else ('"input"', '"a"')
    assert accepts(found, call.replace("*", f"{name}:{text}"))
    assert not accepts(found, call.replace("*", ""))
    assert not accepts(found, call.replace("*", f"{name}:1"))


def test_a_parser_without_a_tag_holds_strict_tools_alone(grammars):
    """It is sent a JSON schema of all tools."""
    tools = [(None, ODD), (True, {"type": "object", "properties": {"a": {"type": "null"}}})]
    found = Asked("granite4", tools, "required").table(grammars)
    for name, value, is_held in (("t0", "5", False), ("t1", "null", False), ("t1", "5", True)):
        text = f'[{{"name": "{name}", "parameters": {{"a": {value}}}}}]'
        assert accepts(found, text) is not is_held


@pytest.mark.parametrize("parameters", [None, {}])
@pytest.mark.parametrize(("parser", "argument"), [("gemma4", "a:1"), ("hermes", '"a": 1')])
def test_a_strict_tool_without_parameters_has_none(grammars, parser, argument, parameters):
    found = Asked(parser, [(True, parameters)], "required").table(grammars)
    call = CALLS[parser].format(name="t0")
    assert accepts(found, call.replace(argument, "")) and not accepts(found, call)


@pytest.mark.parametrize("name", ['a b"c', "a\n", "a>"])
def test_a_name_that_would_end_in_the_middle_is_refused(name):
    parser = parser_of(ParserManager.get_parser("hermes", enable_auto_tools=True))
    tools = [{"type": "function", "function": {"name": name}}]
    said = [{"role": "user", "content": "x"}]
    request = ChatCompletionRequest(messages=said, tools=tools, tool_choice="auto")
    with pytest.raises(VLLMValidationError) as refused:
        parser(TOKENIZER, request.tools).adjust_request(request)
    assert refused.value.parameter == "tools"


def test_a_refusal_names_the_tool(grammars):
    with pytest.raises(Unsupported, match="The tool 't0'"):
        Asked("gemma4", [(True, ODD)], "required").table(grammars)
