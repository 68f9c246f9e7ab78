"""LiteLLM and LangChain chat and ask typed decisions, unchanged, in a process of their own."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import decision_clients
from tests.support.process import printed_json, run_python
from tests.support.server_harness import MODEL, Server

pytest_plugins = ["tests.support.server_harness"]

CLIENTS = Path(sys.prefix) / "clients"
pytestmark = pytest.mark.skipif(not CLIENTS.exists(), reason="`make test-all` installs the clients")


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, Any]:
    given = (decision_clients.__file__, f"{server.url}/v1", MODEL)
    return dict(printed_json(run_python(*given, environment={"PYTHONPATH": str(CLIENTS)})))


@pytest.mark.parametrize("name", ["openai decisions", "hosted_vllm decisions"])
def test_litellm(server, answers, name):
    asked = server.client().decisions.create(
        model=MODEL, input=decision_clients.TEXT, questions=decision_clients.OPENAI
    )
    predicate, choice, score = answers[name]["answers"]
    assert answers[name]["answers"] == answers[f"{name.split()[0]} adecisions"]["answers"]
    assert predicate["probability"] == asked.answers[0].probability
    assert [one["value"] for one in choice["probabilities"]] == ["Ann", True]
    assert score["score"] == asked.answers[2].score


@pytest.mark.parametrize("name", ["openai systemone", "hosted_vllm systemone"])
def test_litellm_in_vllms_shape(answers, name):
    found = answers[name]["answers"]
    assert found["more"]["noul"] == answers["openai decisions"]["answers"][0]["probability"]
    assert set(found["who"]["probabilities"]) == {"Ann", "Bob"}


def test_langchain(answers):
    one, two, three = (answers[f"langchain {way}"] for way in ("invoke", "ainvoke", "batch"))
    assert one["answers"] == two["answers"] == three["answers"]
    found = one["answers"]
    expected = answers["openai decisions"]["answers"][0]["probability"]
    assert found["more"]["probability"] == expected
    assert found["who"]["choice"] in ("Ann", "Bob")
    assert 0 <= found["many"]["score"] <= 1


def test_chats_give_the_answer_that_openais_client_gets(server, answers):
    said = server.client().chat.completions.create(
        model=MODEL, messages=decision_clients.SAID, seed=1, max_tokens=64
    )
    expected = said.choices[0].message.content
    chats = {
        f"{client} {way}": answers[f"{client} {way}"]
        for client in ("openai", "hosted_vllm", "langchain")
        for way in ("chat", "achat", "stream")
    }
    assert chats == dict.fromkeys(chats, expected)


def test_langchain_gets_what_its_schema_says(answers):
    found = answers["langchain structured"]
    assert {key: type(value) for key, value in found.items()} == {"name": str, "age": int}
