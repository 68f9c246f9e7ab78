"""vLLM's own parsers read the right answers: calls, thoughts and where a grammar is to start."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from dllm.tasks.chat import END_OF_THOUGHT, STYLES, THOUGHT, call_text
from dllm.tasks.suite import TOOL_FAMILIES, Question, question
from dllm.tasks.tokenizer import encode_answer, save_tokenizer
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE, encode_chat, train_tool_tokenizer

TOKENIZER = train_tool_tokenizer()
PARSERS = {"gemma": "gemma4", "hermes": "hermes"}
ITEMS = [question(family, "heldout", i) for family in TOOL_FAMILIES for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, path, 512, TOOL_CHAT_TEMPLATE)
    return AutoTokenizer.from_pretrained(path)


def request_of(item: Question) -> ChatCompletionRequest:
    assert item.chat is not None
    return ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": item.prompt}],
        tools=item.chat.schemas or None,
        chat_template_kwargs=item.chat.template_kwargs,
    )


def reasoning_parser(tokenizer, item: Question):
    assert item.chat is not None
    kind = ReasoningParserManager.get_reasoning_parser("gemma4")
    return kind(tokenizer, chat_template_kwargs=item.chat.template_kwargs)


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_read_as_they_were_meant(tokenizer, style: str) -> None:
    """The thought is told from the answer, and a call from content."""
    calls = 0
    for item in ITEMS:
        assert item.chat is not None
        if item.chat.style != style:
            continue
        request = request_of(item)
        thought, rest = reasoning_parser(tokenizer, item).extract_reasoning(item.answer, request)
        parser = ToolParserManager.get_tool_parser(PARSERS[style])(tokenizer, request.tools)
        read = parser.extract_tool_calls(rest, request)
        assert (thought is not None) is item.chat.thinking
        head = f"{THOUGHT}{thought}{END_OF_THOUGHT}" if item.chat.thinking else ""
        if read.tools_called:
            (call,) = read.tool_calls
            arguments = json.loads(call.function.arguments)
            said, calls = call_text(call.function.name, arguments, item.chat.style), calls + 1
        else:
            said = read.content
        assert head + said == item.answer
    assert calls > 30


def test_a_grammar_starts_behind_the_end_of_the_thought(tokenizer) -> None:
    """At once when the chat does not think: the prompt then ends with an empty thought."""
    end = TOKENIZER.token_to_id(END_OF_THOUGHT)
    for item in ITEMS:
        assert item.chat is not None
        parser = reasoning_parser(tokenizer, item)
        prompt, answer = encode_chat(TOKENIZER, item), encode_answer(TOKENIZER, item.answer)
        assert parser.is_reasoning_end(prompt) is not item.chat.thinking
        assert answer.count(end) == item.chat.thinking
        for length in range(1, len(answer) + 1):
            seen = answer[:length]
            ended = end in seen or not item.chat.thinking
            assert parser.is_reasoning_end(prompt + seen) is ended
