"""Typed decisions through a real server, asked by OpenAI's SDK as it is."""

import asyncio
from typing import Any

import openai
import pytest

from dllm.settings.vllm_names import is_0_32
from tests.support.server_harness import MODEL

pytest_plugins = ["tests.support.server_harness"]

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
FINISHED = "vllm:request_success_total"
INPUT = "Ann has 34, Bob has 51."
PREDICATE = {"type": "predicate", "instructions": "Ann has more than Bob", "name": "more"}
CHOICE = {
    "type": "choice",
    "instructions": "Who has more?",
    "choices": [{"value": "Ann"}, {"value": "Bob", "description": "second"}, {"value": True}],
}
SCORE = {
    "type": "score",
    "instructions": "How many?",
    "levels": [{"label": "few"}, {"label": "some"}, {"label": "many"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]
SYSTEMONE = {
    "model": MODEL,
    "state": INPUT,
    "questions": {
        "p": {"type": "noul", "instructions": PREDICATE["instructions"]},
        "c": {"type": "choice", "criteria": {f"option {i}": None for i in range(40)}},
        "s": {"type": "score", "criteria": ["few", "some", "many"]},
    },
}


def decide(client: openai.OpenAI, questions: Any = QUESTIONS, **options: Any) -> Any:
    given = {"model": MODEL, "input": INPUT} | options
    return client.decisions.create(questions=questions, **given)


def test_each_type_is_answered_with_probabilities(client):
    decision = decide(client)
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "more")
    assert 0 <= predicate.probability <= 1
    of_choice = {one.value: one.probability for one in choice.probabilities}
    assert list(of_choice) == ["Ann", "Bob", True]
    assert choice.choice == max(of_choice, key=of_choice.__getitem__)
    top = max(of_choice.values())
    assert choice.confidence == pytest.approx((top - 1 / 3) / (2 / 3))
    assert [(one.label, one.value) for one in score.probabilities] == [
        ("few", 0),
        ("some", 1),
        ("many", 2),
    ]
    assert score.score == pytest.approx(
        sum(one.value * one.probability for one in score.probabilities)
    )
    for answer in (choice, score):
        assert sum(one.probability for one in answer.probabilities) == pytest.approx(1)
    usage = decision.usage
    assert usage.output_tokens == 3
    assert usage.total_tokens == usage.input_tokens + 3


def test_the_asynchronous_client_gets_the_same(client, server):
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
            return await other.decisions.create(model=MODEL, input=INPUT, questions=QUESTIONS)

    assert asyncio.run(ask()).answers == decide(client).answers


def test_diagnostics_and_metrics_tell_of_samples(server, client):
    names = [f"dllm:decision_{name}_total" for name in ("questions", "reads", "refusals")]
    one = decide(client, extra_body={"samples": 1})
    before = server.metrics(*names)
    four = decide(client)
    assert [b - a for a, b in zip(before, server.metrics(*names), strict=True)] == [3, 12, 0]
    assert [each["samples"] for each in four.diagnostics] == [4, 4, 4]
    assert all(not any(each["standard_errors"]) for each in one.diagnostics)
    assert all(any(each["standard_errors"]) for each in four.diagnostics)
    assert 0 < four.diagnostics[0]["label_mass"] <= 1
    assert 0 <= four.diagnostics[0]["hesitation"] <= 1


def test_options_are_spelled_where_labels_are_few_and_true_stands_beside_its_text(client):
    """More options than the vocabulary has codes; several beginnings are shared."""
    values = [True, "true", False, "false", '"true"', *(f"n{number}" for number in range(40))]
    (answer,) = decide(client, [CHOICE | {"choices": [{"value": v} for v in values]}]).answers
    assert [one.value for one in answer.probabilities] == values
    assert sum(one.probability for one in answer.probabilities) == pytest.approx(1)
    assert answer.choice in values


def test_input_may_be_turns_calls_and_json(client):
    turns = [
        {"role": "system", "content": "Count."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "How many?"},
                {"type": "input_json", "data": {"a": [1, None, True]}},
            ],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "34"},
    ]
    assert len(decide(client, input=turns).answers) == 3


def test_a_salt_is_a_cache_key(client):
    def cached(**key: str) -> int:
        decision = decide(client, [PREDICATE], input="salted " * 60, extra_body=key)
        return int(decision.usage.input_tokens_details.cached_tokens)

    assert cached(cache_salt="a") == 0
    assert cached(prompt_cache_key="a") == cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0


def test_questions_of_a_client_that_sends_joint_have_their_own_canvases(server, client):
    assert decide(client, extra_body={"joint": False}).answers == decide(client).answers
    reply = server.post("/v1/systemone", SYSTEMONE | {"joint": True})
    # vLLM 0.32 does not know the field and passes over it.
    expected = (200, None) if is_0_32() else (400, "joint")
    assert (reply.status, reply.parameter) == expected, reply.text


def test_a_client_that_leaves_frees_its_places(client, server):
    """1,600 canvases would take many seconds; a question behind them has an empty engine."""
    body = {"model": MODEL, "input": "left behind", "questions": [PREDICATE] * 400, "samples": 4}
    before = server.metrics(FINISHED)
    leaving = server.sent("/v1/decisions", body)
    while server.metrics(FINISHED) == before:
        pass  # every turn asks the server
    leaving.close()
    assert decide(client).answers
    assert server.metrics(RUNNING) == server.metrics(WAITING) == [0]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        decide(client, model="gpt-6-luna")


def test_vllm_s_own_route_takes_the_same_strategy(server):
    answers = server.ask("/v1/systemone", SYSTEMONE)["answers"]
    (asked,) = decide(server.client(), [PREDICATE]).answers
    assert answers["p"]["noul"] == asked.probability
    assert len(answers["c"]["probabilities"]) == 40
    assert list(answers["s"]["probabilities"]) == ["0", "1", "2"]
