"""Structured outputs and tool calls of a trained model with blocks, through OpenAI's client.

That every answer is valid, and what is refused: ``tests/engine/test_family_grammars.py``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.support.server_harness import MODEL, Server

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
ASK: Any = [
    {
        "role": "user",
        "content": "Write name, age and city as JSON: Lou is 28 and lives in Baku.",
    }
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FLAGS = (
    f"--served-model-name={MODEL}",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
SEEDS = range(12)

pytestmark = pytest.mark.slow


class Person(pydantic.BaseModel):
    """What the models were trained to write."""

    name: str
    age: int
    city: str


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("tiny-sdar") / "log"
    with Server(CHECKPOINTS / "tiny-sdar", log, FLAGS) as running:
        running.wait_until_ready()
        yield running.client()


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"messages": ASK, "max_tokens": 120, "temperature": 0} | options
    return client.chat.completions.create(model=MODEL, **options)


def test_a_form_that_the_model_knows_has_the_right_answer(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=120, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(name="Lou", age=28, city="Baku")


def seed_temperature(seed: int) -> float:
    return (0.0, 0.7, 1.0, 2.0)[seed % 4]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_tool_is_called_as_its_schema_says(client, choice):
    for seed in SEEDS:
        answer = chat(
            client, tools=[TOOL], tool_choice=choice, seed=seed, temperature=seed_temperature(seed)
        ).choices[0]
        (call, *_) = answer.message.tool_calls
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])
