"""`vllm serve` of a model with blocks, through the real OpenAI client."""

import select
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest

from tests.support.server_harness import MODEL, Server

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.sdar_server"]

# Of a trained model: varied texts, which no end-of-sequence ends.
VARIED = {"temperature": 2.0, "logit_bias": {"1": -100}}


@pytest.fixture(scope="module")
def server(sdar_server: Server) -> Server:
    return sdar_server


def complete(client: openai.OpenAI, prompt: Any = "Sort these numbers", **options: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True} | options.pop("extra", {})
    extra |= {"vllm_xargs": {"diffusion_threshold": 0.3} | options.pop("xargs", {})}
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        **({"max_tokens": 70, "seed": 1} | VARIED | options),
        extra_body=extra,
    )


def test_the_same_tokens_whichever_way_one_asks(server: Server) -> None:
    client = server.client()
    (whole,) = complete(client).choices
    assert len(whole.token_ids) == 70
    streamed = [chunk.choices[0].text for chunk in complete(client, stream=True) if chunk.choices]
    assert len(streamed) > 1 and "".join(streamed) == whole.text
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(complete, client, seed=1 + at % 2) for at in range(6)]
        together = [future.result().choices[0].token_ids for future in futures]
    assert together[::2] == [whole.token_ids] * 3
    assert together[1] == together[3] == together[5] != whole.token_ids
    both = complete(client, n=2).choices
    assert both[0].token_ids == whole.token_ids != both[1].token_ids
    stop = whole.text[10:14]
    (stopped,) = complete(client, stop=stop).choices
    assert stopped.text == whole.text[: whole.text.index(stop)]
    (scored,) = complete(client, logprobs=2, max_tokens=40).choices
    assert len(scored.logprobs.token_logprobs) == 40 and max(scored.logprobs.token_logprobs) <= 0


def test_texts_are_pinned_and_holes_filled(server: Server) -> None:
    """Whatever the prompt's length leaves of its block; some prompts leave no room for a hole."""
    client, widths = server.client(), {"diffusion_fill_widths": [1, 1]}
    held = {"diffusion_pins": [{"at": 3, "ids": [40, 41]}]}
    num_filled = 0
    for length in range(3, 8):
        prompt = list(range(50, 50 + length))
        xargs = {"diffusion_pin_mode": "hold"}
        (choice,) = complete(client, prompt, extra=held, xargs=xargs).choices
        assert choice.token_ids[3:5] == [40, 41]
        try:
            hole = complete(client, prompt, suffix="a", max_tokens=1, xargs=widths).choices[0]
        except openai.BadRequestError as refused:
            assert "the rest of the block in which the prompt ends" in str(refused)
        else:
            assert len(hole.token_ids) == 1
            num_filled += 1
    assert num_filled > 0


IN_ENGINE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
PREDICATE = {"type": "predicate", "instructions": "Ann has more than 20"}
LARGE = {
    "/v1/scores": {"prompt": "a", "text": "b", "samples": 1600},
    "/v1/decisions": {"input": "Ann has 34.", "questions": [PREDICATE] * 400},
    "/v1/completions": {"prompt": ["a"] * 512, "max_tokens": 70, "ignore_eos": True},
}


@pytest.mark.parametrize("path", LARGE)
def test_whoever_comes_behind_a_large_body_does_not_wait_for_all_of_it(
    server: Server, path: str
) -> None:
    """No more of its requests are in the engine than run at a time, which are 8."""
    client = server.client()
    (before,) = server.metrics("vllm:request_success_total")
    large = server.sent(path, {"model": MODEL} | LARGE[path])
    while server.metrics("vllm:request_success_total") == [before]:
        pass  # every turn asks the server
    complete(client, max_tokens=8)
    in_engine = sum(server.metrics(*IN_ENGINE))
    is_answered = select.select([large.sock], [], [], 0)[0]
    large.close()
    # Those of the body before may not have left yet.
    assert not is_answered and in_engine <= 16


def test_texts_are_scored(server: Server) -> None:
    """The same again for the same body."""
    body = {"prompt": "Sort these numbers", "text": "1 2 3 and some more of them"}
    bodies = [body, body | {"samples": 1}, body | {"places": [4, 0]}, body | {"seed": 1}]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(partial(server.ask, "/v1/scores"), 2 * bodies))
    estimate, single, places, other = answers[:4]
    assert answers[4:] == answers[:4]
    assert estimate["samples"] == 8 and estimate["standard_error"] > 0 > estimate["elbo"]
    assert single["standard_error"] is None and other["elbo"] != estimate["elbo"]
    assert [at for at, one in enumerate(places["token_logprobs"]) if one is not None] == [0, 4]
    reply = server.post("/v1/scores", body | {"places": [400]})
    assert reply.status == 400 and "places" in reply.message
    assert server.post("/v1/scores", body | {"model": "other"}).status == 404
    for salt in ("\ud800", "", "a/b"):  # half a character, and what vLLM allows on no route
        reply = server.post("/v1/scores", body | {"cache_salt": salt})
        assert reply.status == 400 and "cache_salt" in reply.message, reply
