"""Questions answered with a tool call, with JSON or behind a thought, and their template."""

import json
import re
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from bench.toys.chat import END_OF_THOUGHT, THOUGHT, TOOLS, Chat, call_text
from bench.toys.suite import Question, question
from bench.toys.tools import NO_TOOL

TOOL_OF = {"weather": "get_weather", "total": "add", "alarm": "set_alarm", "phone": "lookup"}


def drawn(family: str, split: str = "train", count: int = 300) -> list[Question]:
    return [question(family, split, index) for index in range(count)]


def chat_of(item: Question) -> Chat:
    assert item.chat is not None
    return item.chat


def parts(item: Question) -> tuple[str | None, str]:
    """Thought and rest of the answer."""
    if not chat_of(item).thinking:
        return None, item.answer
    assert item.answer.startswith(THOUGHT)
    thought, end, rest = item.answer.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    assert end
    return thought, rest


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoTokenizer.from_pretrained("checkpoints/tiny-tools")


# --------------------------------------------------------------------------------------------------
# Answers, worked out again from the prompt


def arguments_in(item: Question) -> dict[str, object]:
    """What the prompt asks for, read with other means than those that wrote it."""
    text = item.prompt
    words = set(re.findall(r"[A-Za-z]+", text))
    if item.family == "weather":
        properties = TOOLS["get_weather"]["function"]["parameters"]["properties"]
        (day,) = words & set(properties["day"]["enum"])
        (unit,) = words & set(properties["unit"]["enum"])
        rest = words - {day, unit, "What", "How", "Use", "Weather"}
        (city,) = (word for word in rest if word[0].isupper())
        return {"city": city, "day": day, "unit": unit}
    if item.family == "total":
        first, second = map(int, re.findall(r"\d+", text))
        return {"a": first, "b": second}
    if item.family == "alarm":
        found = re.search(r"(\d+):(\d\d)", text)
        label = re.search(r"(?:for|want) ([a-z]+)", text)
        assert found and label
        return {"hour": int(found[1]), "label": label[1], "minute": int(found[2])}
    name = re.search(r"([A-Z]\w+ [A-Z]\w+)[.?]$", text)
    assert name
    return {"name": name[1]}


@pytest.mark.parametrize("family", TOOL_OF)
def test_calls_have_the_arguments_of_the_question(family: str) -> None:
    tool = TOOL_OF[family]
    schema = TOOLS[tool]["function"]["parameters"]
    for item in drawn(family):
        chat, (thought, answer) = chat_of(item), parts(item)
        arguments = arguments_in(item)
        jsonschema.validate(arguments, schema)
        assert list(arguments) == sorted(schema["properties"]) == list(schema["properties"])
        if tool in chat.tools:
            assert answer == call_text(tool, arguments, chat.style)  # type: ignore[arg-type]
            assert thought in (None, f"I call {tool}.")
        elif family == "total":
            first, second = arguments.values()
            assert answer == str(first + second)  # type: ignore[operator]
            if thought is not None:
                left, right = thought.split(" = ")
                assert sum(map(int, left.split(" + "))) == int(right)
        else:
            assert answer == NO_TOOL and thought in (None, "No tool fits.")


def test_records_have_the_keys_that_are_asked_for() -> None:
    for item in drawn("record"):
        asked, sentence = item.prompt.removeprefix("Write ").split(" as JSON: ")
        thought, answer = parts(item)
        record = json.loads(answer)
        assert list(record) == asked.split(", ") and 2 <= len(record) <= 4
        (age,) = map(int, re.findall(r"\d+", sentence))
        assert record.get("age", age) == age
        assert record.get("adult", age >= 18) is (age >= 18)
        assert all(str(record[key]) in sentence for key in ("name", "city") if key in record)
        assert thought in (None, f"{age} is {'' if age >= 18 else 'not '}18 or more.")


# --------------------------------------------------------------------------------------------------
# Chat template


def function(name: str, **of_it: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **of_it}}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": " What is 34 + 7? "}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [function("add", arguments={"b": 7, "a": 34})],
    },
    {"role": "tool", "name": "add", "tool_call_id": "1", "content": "41"},
]
# Every kind of argument; and tools without parameters, or with parameters of no type or several.
KINDS = function("f", arguments={"s": "x", "l": [1, "y"], "o": {"k": None, "b": True}, "f": 1.5})
LOOSE = {"any": {}, "some": {"type": ["string", "null"]}}
OTHERS = [function("now"), function("f", parameters={"properties": LOOSE})]


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            CONVERSATION,
            {"tools": [TOOLS["add"]]},
            "<bos><|turn>system\n"
            "Be brief.<|tool>declaration:add{a:INTEGER,b:INTEGER}<tool|><turn|>\n"
            "<|turn>user\nWhat is 34 + 7?<turn|>\n"
            "<|turn>model\n<|tool_call>call:add{a:34,b:7}<tool_call|><turn|>\n"
            '<|turn>tool\n<|tool_response>response:add{value:<|"|>41<|"|>}<tool_response|>'
            "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        ),
        (
            CONVERSATION,
            {"tools": [TOOLS["add"]], "tool_style": "hermes", "enable_thinking": True},
            "<bos><|turn>system\n<|think|>\nBe brief.<tools>\n"
            '{"name": "add", "parameters": {"a": "integer", "b": "integer"}}\n</tools><turn|>\n'
            "<|turn>user\nWhat is 34 + 7?<turn|>\n<|turn>model\n<tool_call>\n"
            '{"name": "add", "arguments": {"b": 7, "a": 34}}\n</tool_call><turn|>\n'
            "<|turn>tool\n<tool_response>\n41\n</tool_response><turn|>\n<|turn>model\n",
        ),
        (
            [{"role": "assistant", "tool_calls": [KINDS]}],
            {},
            "<bos><|turn>model\n<|tool_call>call:f"
            '{f:1.5,l:[1,<|"|>y<|"|>],o:{b:true,k:null},s:<|"|>x<|"|>}<tool_call|><turn|>\n'
            "<|turn>model\n<|channel>thought\n<channel|>",
        ),
        (
            [{"role": "user", "content": "Hi"}],
            {"tools": OTHERS},
            "<bos><|turn>system\n<|tool>declaration:now{}<tool|>"
            "<|tool>declaration:f{any:ANY,some:ANY}<tool|><turn|>\n"
            "<|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        ),
    ],
    ids=["gemma", "hermes", "arguments", "tools of others"],
)
def test_what_the_template_writes(bundled, messages, options, expected) -> None:
    text = bundled.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert text == expected


def test_an_unknown_role_is_refused(bundled) -> None:
    with pytest.raises(Exception, match="Role robot; allowed: system first, user"):
        bundled.apply_chat_template([{"role": "robot", "content": "Hi"}], tokenize=False)
