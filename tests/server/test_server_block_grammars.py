"""Structured outputs and tool calls of trained models with blocks, through OpenAI's client."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

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
DATE = r"[0-9]{4}/[0-9]{2}/[0-9]{2}"
SEEDS = range(12)

pytestmark = pytest.mark.slow


class Person(pydantic.BaseModel):
    """What the models were trained to write."""

    name: str
    age: int
    city: str


class Other(pydantic.BaseModel):
    """What they were not trained to write."""

    mood: Literal["good", "bad"]
    age: str = pydantic.Field(max_length=5)
    name: str = pydantic.Field(max_length=10)


@pytest.fixture(
    scope="module", params=["tiny-sdar", pytest.param("tiny-llada2", marks=pytest.mark.nightly)]
)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp(request.param) / "log"
    with Server(CHECKPOINTS / request.param, log, FLAGS) as running:
        running.wait_until_ready()
        yield running.client()


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"messages": ASK, "max_tokens": 120, "temperature": 0} | options
    return client.chat.completions.create(model=MODEL, **options)


def structured(client: openai.OpenAI, asked: dict[str, Any], **options: Any) -> str:
    (choice,) = chat(client, extra_body={"structured_outputs": asked}, **options).choices
    assert choice.finish_reason == "stop", choice
    return choice.message.content or ""


def test_a_form_that_the_model_knows_has_the_right_answer(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=120, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(name="Lou", age=28, city="Baku")


def test_answers_are_valid_for_every_seed_alone_and_in_a_crowd(client):
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"json": Other.model_json_schema()}, Other.model_validate_json),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": DATE}, re.compile(DATE).fullmatch),
        ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}.__contains__),
        ({"grammar": 'root ::= "<" [a-c]+ ">"'}, re.compile("<[a-c]+>").fullmatch),
    ]
    cases = [(asked, seed) for asked, _ in forms for seed in SEEDS]

    def ask(case: tuple[dict[str, Any], int]) -> str:
        return structured(client, case[0], seed=case[1], temperature=seed_temperature(case[1]))

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, cases))
    for (asked, seed), text in zip(cases, together, strict=True):
        is_right = next(judge for form, judge in forms if form is asked)
        assert is_right(text), (asked, seed, text)
    for at in range(0, len(cases), 5):
        assert ask(cases[at]) == together[at]


def seed_temperature(seed: int) -> float:
    return (0.0, 0.7, 1.0, 2.0)[seed % 4]


def test_a_stream_has_the_same_text(client):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": Other.model_json_schema()},
    }
    whole = chat(client, response_format=form, seed=3, temperature=1).choices[0].message.content
    parts = chat(client, response_format=form, seed=3, temperature=1, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    Other.model_validate_json(whole)


def test_json_object_as_response_format_with_several_samples(client):
    form = {"type": "json_object"}
    answers = chat(client, response_format=form, n=3, seed=1, temperature=1.0).choices
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in answers)


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


def test_what_may_leave_no_text_is_still_refused(client):
    asked = {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 3}
    with pytest.raises(openai.BadRequestError, match="min_tokens beside structured outputs"):
        chat(client, extra_body=asked)
