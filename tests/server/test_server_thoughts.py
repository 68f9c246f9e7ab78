"""Thinking budgets over HTTP, of a model that never ends a thought, and no answer either."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.edited import edited
from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, MODEL, Server, serving

START, END, STOPS = 17, 18, (1, 6)
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
MESSAGES = [{"role": "user", "content": "What is 3 + 5?"}]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ENDED = "dllm:thoughts_ended_by_budget_total"
FLAGS = (*COMMON_FLAGS, "--max-model-len=2048", "--reasoning-parser=gemma4")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    def never(tensors: dict[str, Any]) -> None:
        embedding = tensors["model.decoder.embed_tokens.weight"]
        embedding[[END, *STOPS]] = 0
        embedding[START] *= 0.6  # enough to begin with; in a long thought it does not come again

    path = tmp_path_factory.mktemp("thoughts") / "model"
    yield from serving(edited(CHECKPOINTS / "tiny-tools", path, never), tmp_path_factory, FLAGS)


def chat(**options: Any) -> dict[str, Any]:
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "seed": 1}
    return common | THINK | {"return_token_ids": True} | options


def num_thoughts(tokens: list[int]) -> int:
    """Tokens of the only thought that was ended, with which the answer begins."""
    assert tokens[0] == START and tokens.count(END) == 1
    return tokens.index(END) - 1


@pytest.mark.parametrize("budget", [0, 1, 20, 40, 100])
def test_a_chat_thinks_as_much_as_its_budget(server, budget):
    before = server.metrics(ENDED)
    (choice,) = server.ask(CHAT, chat(thinking_token_budget=budget))["choices"]
    assert num_thoughts(choice["token_ids"]) == budget
    assert choice["message"]["content"].strip()
    assert server.metrics(ENDED) == [sum(before) + 1]


def test_without_a_budget_there_is_no_answer(server):
    for given in ({}, {"thinking_token_budget": None}, {"thinking_token_budget": -1}):
        (choice,) = server.ask(CHAT, chat(**given))["choices"]
        assert END not in choice["token_ids"] and not choice["message"]["content"]


def test_thoughts_that_the_template_turns_off_have_no_end(server):
    """The prompt holds an empty thought."""
    asked = chat(chat_template_kwargs={"enable_thinking": False}, thinking_token_budget=5)
    (choice,) = server.ask(CHAT, asked | {"logit_bias": {str(START): -100}})["choices"]
    assert END not in choice["token_ids"] and choice["message"]["content"]


@pytest.mark.parametrize("budget", [33, 1])  # 1: the word "thought" alone, which no answer shows
def test_a_stream_has_the_same_thought_and_answer(server, budget):
    asked = chat(thinking_token_budget=budget)
    (choice,) = server.ask(CHAT, asked)["choices"]
    thought, answer, tokens = "", "", []
    given = {key: asked[key] for key in (*THINK, "thinking_token_budget", "return_token_ids")}
    stream = server.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=150, seed=1, stream=True, extra_body=given
    )
    for part in stream:
        delta = part.choices[0].delta
        thought += getattr(delta, "reasoning", None) or ""
        answer += delta.content or ""
        tokens += getattr(part.choices[0], "token_ids", None) or []
    assert tokens == choice["token_ids"] and num_thoughts(tokens) == budget
    assert thought == (choice["message"]["reasoning"] or "")
    assert answer == choice["message"]["content"]


def test_completions_and_responses(server):
    prompt = "<bos><|channel>thought\n1 2 3"
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "return_token_ids": True}
    (free,) = server.ask(COMPLETIONS, asked)["choices"]
    assert END not in free["token_ids"]
    (bound,) = server.ask(COMPLETIONS, asked | {"thinking_token_budget": 40})["choices"]
    given = len(bound["prompt_token_ids"]) - bound["prompt_token_ids"].index(START) - 1
    assert bound["token_ids"].index(END) == 40 - given  # what the prompt thinks counts
    call = {"prompt": f"{prompt}<|tool_call>call:add{{", "thinking_token_budget": 4}
    (called,) = server.ask(COMPLETIONS, asked | call)["choices"]
    assert END not in called["token_ids"]  # a call ends the thought as its end does
    answer = server.client().responses.create(
        model=MODEL,
        input="What is 3 + 5?",
        max_output_tokens=80,
        extra_body={**THINK, "vllm_xargs": {"thinking_token_budget": 20}},
    )
    assert answer.output_text and answer.output[0].type == "reasoning"


@pytest.mark.parametrize("is_stream", [False, True])
def test_anthropics_client_gets_a_thought_of_its_budget_and_an_answer(server, is_stream):
    """Its least budget; nothing else asks the model to think."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = dict(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1100,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    before = sum(server.metrics(ENDED))
    if is_stream:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought, answer = message.content
    assert thought.thinking and answer.text.strip()
    tokenized = server.ask("/tokenize", {"model": MODEL, "prompt": thought.thinking})
    assert 0 < tokenized["count"] <= 1024 + 1  # with a <bos>
    assert sum(server.metrics(ENDED)) == before + 1


def test_what_cannot_be_kept_is_refused_by_name(server):
    held = {"diffusion_pin_at": [3], "diffusion_pin_ids": [40], "diffusion_pin_mode": "hold"}
    for extra in (held, {"thinking_token_budget": 3}):
        reply = server.post(CHAT, chat(thinking_token_budget=5, vllm_xargs=extra))
        assert (reply.status, reply.parameter) == (400, "thinking_token_budget")
    asked = {"model": MODEL, "input": "x", "max_output_tokens": 8, "thinking_token_budget": 5}
    reply = server.post(RESPONSES, asked)
    assert (reply.status, reply.parameter) == (400, "thinking_token_budget")
    budget = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1030, "vllm_xargs": held}
    reply = server.post("/v1/messages", body | {"thinking": budget})
    message = json.loads(reply.text)["error"]["message"]
    assert reply.status == 400 and message.startswith("thinking ")
    assert "thinking_token_budget" not in message
