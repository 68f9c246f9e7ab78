"""A server of tiny-sdar through OpenAI's client: forms, tool calls, adapters."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from bench.toys.suite import question
from tests.support.adapters import write_adapter
from tests.support.server_harness import CHECKPOINTS, MODEL, Server, ask_chat

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.sdar_server"]


@pytest.fixture(scope="module")
def client(sdar_server: Server) -> openai.OpenAI:
    return sdar_server.client()


# --- structured outputs and tool calls ------------------------------------------------------------
# That every answer is valid, and what is refused: tests/engine/test_family_grammars.py.

ASK = "Write name, age and city as JSON: Lou is 28 and lives in Baku."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": PARAMETERS},
}


class Person(pydantic.BaseModel):
    """What the models were trained to write."""

    name: str
    age: int
    city: str


def test_a_form_that_the_model_knows_has_the_right_answer(client):
    messages: Any = [{"role": "user", "content": ASK}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person, max_tokens=120, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(name="Lou", age=28, city="Baku")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_tool_is_called_as_its_schema_says(client, choice):
    for seed in range(12):
        sampling = {"seed": seed, "temperature": (0.0, 0.7, 1.0, 2.0)[seed % 4]}
        answer = ask_chat(client, ASK, max_tokens=120, tools=[TOOL], tool_choice=choice, **sampling)
        (call, *_) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


# --- adapters -------------------------------------------------------------------------------------

END = ". Yours, Bob"
ASKED = question("reverse", "heldout", 0)


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    return ask_chat(client, ASKED.prompt, model=model, max_tokens=64, **options)


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_request_names_its_adapter(client):
    assert text(ask(client, MODEL)) == ASKED.answer
    assert text(ask(client, "signed")) == ASKED.answer + END
    stream = ask(client, "signed", stream=True)
    parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(parts) == ASKED.answer + END
    rule = {"structured_outputs": {"regex": "[a-z, ]+" + END.replace(".", "\\.")}}
    assert text(ask(client, "signed", extra_body=rule)) == ASKED.answer + END


def test_a_decision_reads_the_canvas_of_its_adapter(sdar_server):
    choices = [{"value": "Ann"}, {"value": "Bob"}]
    asked = {"type": "choice", "instructions": "Who has more?", "choices": choices}
    body = {"input": ASKED.prompt, "questions": [asked]}
    names = (MODEL, "signed")
    replies = [sdar_server.ask("/v1/decisions", body | {"model": name}) for name in names]
    assert replies[0]["answers"] != replies[1]["answers"]


def test_adapters_come_and_go_and_a_wrong_one_is_refused(
    sdar_server: Server, client: openai.OpenAI, tmp_path: Path
) -> None:
    post = sdar_server.post
    wrong = write_adapter(tmp_path / "wrong", {"lm_head": (832, 128)})
    refused = post("/v1/load_lora_adapter", {"lora_name": "w", "lora_path": str(wrong)})
    assert refused.status == 400 and "lm_head" in refused.message
    again = {"lora_name": "again", "lora_path": str(CHECKPOINTS / "tiny-sdar-signed")}
    assert post("/v1/load_lora_adapter", again).status == 200
    assert text(ask(client, "again")) == ASKED.answer + END
    assert post("/v1/unload_lora_adapter", {"lora_name": "again"}).status == 200
    assert post("/v1/chat/completions", {"model": "again", "messages": []}).status == 404
