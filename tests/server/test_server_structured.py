"""Structured outputs over HTTP, through the real client. The server's model has random weights."""

import json
import re
import threading
from typing import Any, Literal

import pydantic
import pytest

from tests.server.test_server import complete, prompt, tokens
from tests.support.server_harness import MODEL

pytest_plugins = ["tests.support.server_harness"]

ASK = [{"role": "user", "content": "Who is it?"}]


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["good", "bad"]


def test_a_pydantic_model_is_parsed(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=120, seed=3
    )
    person = answer.choices[0].message.parsed
    assert person is not None and person.mood in ("good", "bad")


def test_a_stream_has_the_same_text(client):
    options: dict[str, Any] = dict(
        model=MODEL,
        messages=ASK,
        max_tokens=120,
        seed=3,
        extra_body={"structured_outputs": {"json": Person.model_json_schema()}},
    )
    whole = client.chat.completions.create(**options).choices[0].message.content
    parts = client.chat.completions.create(stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    Person.model_validate_json(whole or "")


@pytest.mark.parametrize(
    ("asked", "is_right"),
    [
        ({"regex": "([a-f]{3}-){2,9}[0-9]"}, re.compile("([a-f]{3}-){2,9}[0-9]").fullmatch),
        ({"choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
        ({"grammar": 'root ::= "<" [a-c]+ ">"'}, re.compile("<[a-c]+>").fullmatch),
        ({"grammar": 'start: "yes" | "no"'}, {"yes", "no"}.__contains__),
    ],
    ids=["regex", "choice", "ebnf", "lark"],
)
def test_completions(client, asked, is_right):
    answer = client.completions.create(
        model=MODEL, prompt="ok", max_tokens=60, seed=2, extra_body={"structured_outputs": asked}
    )
    assert is_right(answer.choices[0].text), answer.choices[0].text


def test_a_request_may_ask_for_no_whitespace(client):
    asked = {"json": Person.model_json_schema(), "disable_any_whitespace": True}
    answer = client.completions.create(
        model=MODEL, prompt="ok", max_tokens=120, seed=3, extra_body={"structured_outputs": asked}
    )
    text = answer.choices[0].text
    assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_the_responses_api(client, is_stream):
    form = {"type": "json_schema", "name": "answer", "schema": Person.model_json_schema()}
    options: dict[str, Any] = dict(model=MODEL, input="Who?", max_output_tokens=120)
    if is_stream:
        events = list(client.responses.create(stream=True, text={"format": form}, **options))
        text = events[-1].response.output_text
    else:
        text = client.responses.create(text={"format": form}, **options).output_text
    Person.model_validate_json(text)


def test_others_go_on_while_a_grammar_is_compiled(client, server):
    """A grammar that takes seconds holds neither the API server nor the engine."""
    expected = tokens(complete(client, prompt(20), max_tokens=32))
    done = threading.Event()
    replies = []

    def ask() -> None:
        slow = {"regex": "(((a{1,30}){1,30}){1,30}){1,30}"}  # it would take hours
        body = {"model": MODEL, "prompt": "ok", "max_tokens": 9, "structured_outputs": slow}
        replies.append(server.post("/v1/completions", body))
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    answered = 0
    while not done.wait(0.5):  # without a pause, the compiler would get no processor
        assert tokens(complete(client, prompt(20), max_tokens=32)) == expected
        answered += 1
    asking.join()
    assert replies[0].status == 400 and "compile" in replies[0].message
    assert answered > 3
