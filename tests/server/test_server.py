"""`vllm serve` through the real OpenAI client: the same tokens whichever way one asks for them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from vllm import SamplingParams

from tests.engine.test_parity import prompt
from tests.support.server_harness import CANVAS, MAX_NUM_BATCHED_TOKENS, MODEL, ask_chat

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.server_harness"]

BLOCKS = 3 * CANVAS


def split(options: dict[str, Any]) -> dict[str, Any]:
    """Random weights say end-of-sequence at any time: it is ignored unless a test is about it."""
    extra = {"return_token_ids": True, "ignore_eos": True} | options.pop("extra_body", {})
    return {"max_tokens": BLOCKS, "seed": 1} | options | {"extra_body": extra}


def complete(client: openai.OpenAI, text: Any = "Sort these numbers", **options: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=text, **split(options))


def chat(client: openai.OpenAI, text: str = "Sort these numbers", **options: Any) -> Any:
    return ask_chat(client, text, **split(options))


def tokens(completion: Any) -> list[int]:
    (choice,) = completion.choices
    return choice.token_ids


def delta_tokens(choice: Any) -> list[int]:
    """The token ids of a chat's delta; the first, which only says who speaks, has none."""
    return getattr(choice, "token_ids", None) or []


# --- one answer, many ways to ask for it ---------------------------------------------------------


def test_the_server_gives_the_tokens_of_the_engine_that_parity_was_shown_on(client, engine):
    """Over HTTP, in chunks of 128 tokens, what `test_parity.py` compares with Hugging Face."""
    contexts = [prompt(5), prompt(150), prompt(300)]
    assert len(contexts[-1]) > 2 * MAX_NUM_BATCHED_TOKENS
    for context in contexts:
        params = SamplingParams(max_tokens=70, seed=11, ignore_eos=True)
        completion = complete(client, context, max_tokens=70, seed=11)
        assert tokens(completion) == engine.generate([context], params)[0]
        assert completion.usage.prompt_tokens == len(context)


def test_a_streamed_completion_is_the_whole_one_block_by_block(client):
    long = {"max_tokens": 12 * CANVAS}
    whole = complete(client, **long)
    stream = list(complete(client, stream=True, stream_options={"include_usage": True}, **long))
    *deltas, last = stream
    assert last.usage == whole.usage
    choices = [delta.choices[0] for delta in deltas]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [token for choice in choices for token in choice.token_ids] == tokens(whole)
    # Tokens leave when their block has converged, not at the end. vLLM joins the blocks that the
    # server has not sent when the next one is there: on a busy machine several, but not twelve.
    assert 1 < len(choices) <= 12
    assert all(len(choice.token_ids) % CANVAS == 0 for choice in choices)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_streamed_chat_is_the_whole_one(client):
    whole = chat(client, max_tokens=12 * CANVAS)
    chunks = chat(client, max_tokens=12 * CANVAS, stream=True)
    deltas = [chunk.choices[0] for chunk in chunks]
    content = "".join(delta.delta.content or "" for delta in deltas)
    assert content == whole.choices[0].message.content
    assert [token for delta in deltas for token in delta_tokens(delta)] == tokens(whole)
    assert 1 < sum(bool(delta.delta.content) for delta in deltas) <= 12  # as above
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_chat_is_the_completion_of_its_template(client):
    rendered = "<bos><|turn>user\nSort these numbers<turn|>\n<|turn>model\n"
    completion = complete(client, rendered, extra_body={"add_special_tokens": False})
    assert tokens(chat(client)) == tokens(completion)


# --- sampling ------------------------------------------------------------------------------------


def test_streamed_samples_arrive_under_their_own_index(client):
    whole = chat(client, n=3, max_tokens=40)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in chat(client, n=3, max_tokens=40, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += delta_tokens(choice)
    assert streamed == {choice.index: choice.token_ids for choice in whole.choices}


# --- where it ends -------------------------------------------------------------------------------


def unique_piece(text: str, start: int) -> str:
    """Four characters of ``text`` from ``start`` on that occur nowhere before."""
    for place in range(start, len(text) - 4):
        piece = text[place : place + 4]
        if "�" not in piece and text.find(piece) == place:
            return piece
    raise AssertionError(f"no unique piece after {start} in {text!r}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    first_block = complete(client, max_tokens=CANVAS).choices[0].text
    text = complete(client).choices[0].text
    stop = unique_piece(text, len(first_block) + 5)
    answer = complete(client, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text.partition(stop)[0]
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


# --- logprobs ------------------------------------------------------------------------------------


def test_logprobs_of_a_completion(client):
    options = {"return_tokens_as_token_ids": True}
    completion = complete(client, logprobs=3, extra_body=options, max_tokens=40)
    assert tokens(completion) == tokens(complete(client, max_tokens=40))
    logprobs = completion.choices[0].logprobs
    names = [f"token_id:{token}" for token in tokens(completion)]
    assert logprobs.tokens == names
    for name, chosen, top in zip(
        names, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert chosen <= 0
        assert len(top) == 3
        # What is emitted is the argmax canvas.
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert next(iter(top)) == name and top[name] == chosen


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client, stream):
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=40, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(content) == 40
    for entry in content:
        first, second = (candidate.logprob for candidate in entry.top_logprobs)
        assert 0 >= first >= second
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == first


# --- other requests in the batch -----------------------------------------------------------------

RUNNING = "vllm:num_requests_running"  # the scheduler's count, as of its last step


def test_a_client_that_leaves_in_mid_stream_disturbs_nobody(server, client):
    context, seed = prompt(40, salt=40), 1
    expected = tokens(complete(client, context, seed=seed))
    for _ in range(3):
        # One token a canvas: it would take seconds.
        slow = {"vllm_xargs": {"diffusion_canvas_length": 1}}
        leaving = complete(client, prompt(60), max_tokens=400, stream=True, extra_body=slow)
        next(iter(leaving))  # it is being served: its first token is here
        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(complete, client, context, seed=seed)
            leaving.close()
            assert tokens(staying.result()) == expected
    assert tokens(complete(client, context, seed=seed)) == expected
    # Nothing goes on for nobody.
    assert server.metrics(RUNNING) == [0]
    assert server.is_healthy()
