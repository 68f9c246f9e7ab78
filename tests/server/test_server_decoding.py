"""`vllm serve` of tiny-nemotron token by token and checking its own drafts: the same answers."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.toys.suite import questions
from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, MODEL, Server, ask_chat, serving

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["ar", "self_speculation"])
def decoding(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(decoding: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = f'--additional-config={{"dllm": {{"decoding": "{decoding}"}}}}'
    flags = (*COMMON_FLAGS, "--max-num-batched-tokens=512", options)
    yield from serving(CHECKPOINTS / "tiny-nemotron", tmp_path_factory, flags)


def ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    return ask_chat(client, question, **({"max_tokens": 100, "temperature": 0} | options))


def answers(server: Server) -> list[str]:
    """Greedy, seeded, stopped, structured and streamed answers, and the tokens of one."""
    client = server.client()
    first, second = (one.prompt for one in questions(["sort", "extract"], "heldout", 1, 0))
    found = [ask(client, first), ask(client, second, temperature=2.0, seed=7)]
    found.append(ask(client, second, temperature=1.0, seed=8, top_p=0.9, stop=["e"]))
    found.append(ask(client, first, logit_bias={"40": 5}, presence_penalty=1.0))
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    found.append(ask(client, second, response_format=form))
    scored = ask(client, first, logprobs=True).choices[0].logprobs.content
    texts = [one.choices[0].message.content for one in found]
    stream = ask(client, second, stream=True)
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    return [*texts, *(f"{one.token} {one.logprob:.3f}" for one in scored)]


said: dict[str, list[str]] = {}


def test_answers_are_those_token_by_token(server: Server, decoding: str) -> None:
    said[decoding] = answers(server)
    assert said[decoding] == said["ar"]
    greedy, _, stopped, _, structured, _ = said["ar"][:6]
    assert len({greedy, stopped, structured}) == 3
    assert json.loads(structured).keys() == {"name", "age"}


def test_drafts_are_kept(server: Server, decoding: str) -> None:
    names = (f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "accepted_tokens"))
    drafts, kept = server.metrics(*names)
    assert kept > drafts > 0 if decoding == "self_speculation" else drafts == 0


@pytest.mark.parametrize(
    ("parameter", "sent"),
    [
        ("diffusion_threshold", {"vllm_xargs": {"diffusion_threshold": 0.5}}),
        ("diffusion_pins", {"diffusion_pins": [{"at": 0, "ids": [20]}]}),
        ("diffusing", {"diffusing": True}),
        ("seed", {"seed": 2**63 - 1, "n": 2, "temperature": 1.0}),
        ("allowed_token_ids", {"allowed_token_ids": [20] * 1025}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_worker_cannot_hold_and_what_canvases_have_is_refused(
    server: Server, parameter: str, sent: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server.client(), "Sort these numbers: 4, 3.", extra_body=sent, stream=stream)
    assert refused.value.param == parameter


def test_a_causal_score_is_the_logprobs_of_the_answer(server: Server, decoding: str) -> None:
    client, prompt = server.client(), "Sort these numbers: 3 1 2"
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0, logprobs=0, extra_body=extra
    )
    (choice,) = answer.choices
    (scored,) = client.completions.create(
        model=MODEL,
        prompt=[*choice.prompt_token_ids, *choice.token_ids],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    ).choices
    of_text = scored.prompt_logprobs[len(choice.prompt_token_ids) :]
    pairs = zip(of_text, choice.token_ids, strict=True)
    found = [row[str(token)]["logprob"] for row, token in pairs]
    assert found == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
