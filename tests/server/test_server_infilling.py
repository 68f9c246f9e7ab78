"""Pins by text and fill in the middle through a real server."""

import openai
import pytest

from tests.server.test_server import chat, complete
from tests.server.test_server_stream import COMPLETIONS, read
from tests.support.server_harness import CANVAS, MODEL, Server

pytest_plugins = ["tests.support.server_harness"]

HOLD = {"vllm_xargs": {"diffusion_pin_mode": "hold"}}


def tokenize(server: Server, text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    return server.ask("/tokenize", body)["tokens"]


def filled(client: openai.OpenAI, suffix: str = " and go", **options):
    """Without a random end of the sequence in front of what is compared."""
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    options = {"max_tokens": 6, "seed": 1} | options
    return client.completions.create(
        model=MODEL, prompt="Sort these", suffix=suffix, extra_body=extra, **options
    )


# --- pins by text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [chat, complete])
def test_texts_are_pinned_in_every_block(server, client, ask):
    first, second = tokenize(server, "name"), tokenize(server, "city")
    pins = [{"at": 3, "text": "name"}, {"at": CANVAS + 4, "text": "city"}]
    (choice,) = ask(client, extra_body=HOLD | {"diffusion_pins": pins}).choices
    assert choice.token_ids[3 : 3 + len(first)] == first
    assert choice.token_ids[CANVAS + 4 : CANVAS + 4 + len(second)] == second


def test_pins_are_seen_in_the_stream(client):
    xargs = HOLD["vllm_xargs"] | {"diffusion_stream": "canvas"}
    extra = {"diffusion_pins": [{"at": 2, "ids": [40, 41]}], "vllm_xargs": xargs}
    seen = read(complete(client, max_tokens=CANVAS, stream=True, extra_body=extra))
    assert all(canvas["ids"][2:4] == [40, 41] for canvas in seen.canvases[0])
    assert all(canvas["entropy"][2:4] == [0, 0] for canvas in seen.canvases[0])


def test_a_stop_string_does_not_end_an_answer_before_its_last_held_pin(server, client):
    held = tokenize(server, "name")
    free = chat(client, extra_body=HOLD | {"diffusion_pins": [{"at": 2, "text": "name"}]})
    early = free.choices[0].message.content[:1]
    pins = [{"at": 2, "text": "name"}, {"at": 20, "text": "name"}]
    extra = HOLD | {"diffusion_pins": pins, "return_token_ids": True}
    (choice,) = chat(client, stop=[early], extra_body=extra).choices
    assert choice.token_ids[20 : 20 + len(held)] == held


# --- fill in the middle ---------------------------------------------------------------------------


def test_a_hole_of_one_width_is_what_pins_give(server, client):
    suffix = tokenize(server, " and go")
    pins = [{"at": 5, "ids": [*suffix, 1]}]
    pinned = client.completions.create(
        model=MODEL,
        prompt="Sort these",
        max_tokens=5 + len(suffix) + 1,
        seed=1,
        extra_body=HOLD | {"diffusion_pins": pins, "return_token_ids": True},
    ).choices[0]
    only = {"vllm_xargs": {"diffusion_fill_widths": [5, 5]}}
    completion = filled(client, extra_body=only)
    (choice,) = completion.choices
    assert choice.token_ids == pinned.token_ids[:5]
    assert choice.text + " and go" == pinned.text
    assert choice.finish_reason == "stop" and completion.usage.completion_tokens == 5


def test_a_stream_has_the_same_hole_and_so_has_every_repetition(client):
    whole = filled(client)
    stream = list(filled(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    assert stream[-1].usage == whole.usage
    assert filled(client).choices == whole.choices
    assert 1 <= whole.usage.completion_tokens <= 6


def test_samples_logprobs_and_several_prompts(client):
    completion = client.completions.create(
        model=MODEL, prompt=["Sort these", "Add " * 60], suffix=" and", n=2, max_tokens=4, seed=1,
        logprobs=1, extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    for choice in completion.choices:
        assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) <= 4
    alone = filled(client, " and", max_tokens=4)
    assert completion.choices[0].token_ids == alone.choices[0].token_ids


def test_an_empty_suffix_is_none(client):
    plain = complete(client, "Sort these", max_tokens=6)
    assert (
        filled(client, "", extra_body={"ignore_eos": True}).choices[0].text == plain.choices[0].text
    )


# How many requests of the engine came to their end; those that were aborted do not count.
FINISHED = "vllm:request_success_total"


def test_a_client_that_leaves_ends_the_whole_search(server, client):
    before = server.metrics(FINISHED)
    body = {
        "model": MODEL,
        "prompt": "Sort these",
        "suffix": " and",
        "max_tokens": 20,
        "n": 16,
        "vllm_xargs": {"diffusion_confidence": 0},  # every canvas takes all of its steps
    }
    connection = server.sent(COMPLETIONS, body)
    while server.metrics(FINISHED) == before:  # it is being served
        assert server.is_healthy()
    connection.close()
    assert complete(client, max_tokens=1).choices  # waits behind what is left of the search
    assert server.metrics(FINISHED)[0] - before[0] < 16 * 20


def test_the_answer_is_the_hole_whatever_the_suffix_holds(server, client):
    """A suffix may end with a token that ends answers, and its end may be a token with a text."""
    eos = "<eos>"
    only = {"vllm_xargs": {"diffusion_fill_widths": [4, 4]}}
    plain = filled(client, " and", extra_body=only).choices[0]
    for suffix, extra in ((" and" + eos, {}), (" and", {"diffusion_fill_end": 40})):
        args = {"vllm_xargs": only["vllm_xargs"] | extra}
        (choice,) = filled(client, suffix, extra_body=args).choices
        assert len(choice.token_ids) == 4 and " and" not in choice.text, suffix
    assert len(plain.token_ids) == 4


def test_a_hole_has_at_least_min_tokens(client):
    extra = {"min_tokens": 3}
    assert filled(client, extra_body=extra).usage.completion_tokens >= 3
