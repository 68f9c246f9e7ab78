"""Sampling parameters over HTTP, through the real client: the engine gets what was sent."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.server.test_server import chat, complete, prompt, tokens
from tests.support.server_harness import CANVAS

pytest_plugins = ["tests.support.server_harness"]

CONTEXT = prompt(20)
SEED_CANVAS = prompt(CANVAS, salt=9)


def both(**options: Any) -> Any:
    """The options of the client (what it does not know goes into extra_body) and of the engine."""
    known = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "n")
    http = {name: value for name, value in options.items() if name in known}
    body = {name: value for name, value in options.items() if name not in known}
    if "extra_args" in body:
        body["vllm_xargs"] = body.pop("extra_args")
    if "logit_bias" in http:
        http["logit_bias"] = {str(token): bias for token, bias in http["logit_bias"].items()}
    if "logprob_token_ids" in body:
        http["logprobs"] = len(body["logprob_token_ids"])
    name = ",".join(f"{key}={value}"[:50] for key, value in options.items())
    return pytest.param(http | {"extra_body": body}, options, id=name)


@pytest.mark.parametrize(
    ("http", "offline"),
    [
        both(temperature=0.3),
        both(temperature=0, seed=6),  # with 5 a greedy answer is the sampled one
        both(temperature=2.0, top_p=0.6),
        both(temperature=2.0, top_k=3),
        both(temperature=2.0, min_p=0.2),
        both(logit_bias={token: 8.0 for token in range(40, 60)}),
        both(allowed_token_ids=list(range(30, 130))),
        both(min_tokens=40, logit_bias={1: 9.0, 6: 9.0}, ignore_eos=False),
        both(presence_penalty=2.0, logit_bias={33: 15.0}),
        both(frequency_penalty=2.0, logit_bias={33: 15.0}),
        both(repetition_penalty=1.8),
        both(bad_words=["a", "the ", "12"], logit_bias={token: 8.0 for token in range(20, 80)}),
        both(logprob_token_ids=[40, 41], extra_args={"diffusion_constrained": True}),
        both(extra_args={"diffusion_seed_canvas": SEED_CANVAS, "diffusion_pinned": [0, 3]}),
        both(extra_args={"diffusion_read_only": True, "diffusion_max_steps": 2}),
        both(extra_args={"diffusion_eos_stop": False}, ignore_eos=False, temperature=1.5),
        both(stop_token_ids=list(range(100, 140)), temperature=1.5),
        both(extra_args={"diffusion_canvas_length": 11, "diffusion_confidence": 0.1}),
        both(extra_args={"diffusion_t_max": 2.0, "diffusion_entropy_bound": 5.0}),
    ],
)
def test_a_parameter_sent_over_http_does_what_it_does_in_the_engine(client, engine, http, offline):
    """What that is, `test_sampling_engine.py` shows."""
    given = {"max_tokens": 70, "seed": 5, "ignore_eos": True} | offline
    sampling = SamplingParams(**given)
    (expected,) = engine.generate([CONTEXT], sampling)
    answer = complete(client, CONTEXT, **({"max_tokens": 70, "seed": 5} | http))
    assert tokens(answer) == expected
    plain = SamplingParams(max_tokens=70, seed=given["seed"], ignore_eos=True)
    assert expected != engine.generate([CONTEXT], plain)[0], "it does nothing"


def test_a_chat_takes_the_same_parameters(client):
    """Over the other endpoint, which has its own parser."""
    body = {"min_tokens": 9, "bad_words": ["a"], "min_p": 0.05, "repetition_penalty": 1.3}
    body |= {"ignore_eos": False, "allowed_token_ids": list(range(200))}
    options = {"max_tokens": 40, "presence_penalty": 0.5, "logit_bias": {"1": 30, "6": 30}}
    answers = [chat(client, **options, extra_body=dict(body)) for _ in range(2)]
    ids = [tokens(answer) for answer in answers]
    assert ids[0] == ids[1]
    # End-of-sequence is all that the model says, and is not said before min_tokens.
    assert len(ids[0]) == 10 and ids[0][-1] in (1, 6) and max(ids[0]) < 200


# --- prompt logprobs -----------------------------------------------------------------------------


def test_echo_returns_the_prompt_and_its_logprobs(client, engine):
    body = {"return_tokens_as_token_ids": True}
    answer = complete(client, CONTEXT, echo=True, logprobs=2, max_tokens=5, extra_body=body)
    logprobs = answer.choices[0].logprobs
    expected = engine.outputs(
        [CONTEXT],
        SamplingParams(max_tokens=5, seed=1, ignore_eos=True, prompt_logprobs=2, logprobs=2),
    )[0]
    ids = CONTEXT + list(expected.outputs[0].token_ids)
    assert logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(ids)
    reference = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    for token, value, row in zip(ids[1:], logprobs.token_logprobs[1:], reference, strict=True):
        assert value == pytest.approx(row[token].logprob, abs=1e-3)


def test_echo_of_the_prompt_alone(client):
    answer = complete(client, CONTEXT, echo=True, logprobs=1, max_tokens=0)
    assert len(answer.choices[0].logprobs.token_logprobs) == len(CONTEXT)


def test_logprobs_of_chosen_ids(client):
    body = {"logprob_token_ids": [40, 41, 42], "return_tokens_as_token_ids": True}
    answer = complete(client, CONTEXT, logprobs=3, max_tokens=9, extra_body=body)
    assert tokens(answer) == tokens(complete(client, CONTEXT, max_tokens=9))
    for chosen, top in zip(tokens(answer), answer.choices[0].logprobs.top_logprobs, strict=True):
        assert set(top) == {f"token_id:{token}" for token in (chosen, 40, 41, 42)}


def test_a_token_that_may_not_be_said_is_reported_as_impossible(client):
    """Its logprob is -inf, which JSON has no number for."""
    body = {"allowed_token_ids": [40], "return_tokens_as_token_ids": True}
    answer = complete(client, CONTEXT, logprobs=2, max_tokens=3, extra_body=body)
    for top in answer.choices[0].logprobs.top_logprobs:
        assert top["token_id:40"] == 0 and sorted(top.values())[:-1] == [-9999.0] * (len(top) - 1)
