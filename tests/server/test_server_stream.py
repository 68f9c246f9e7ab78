"""Unfinished canvases in the streams of a real server: one frame a denoise step, the same text."""

import http.client
import json
import time
from typing import Any, NamedTuple

import openai
import pytest

from tests.server.test_server import RUNNING, chat, complete
from tests.support.patience import HANG_S
from tests.support.server_harness import CANVAS, MAX_WATCHERS, MODEL, Server

pytest_plugins = ["tests.support.server_harness"]

COMPLETIONS = "/v1/completions"
BLOCKS = 3 * CANVAS
FORMS = {"canvas": {"vllm_xargs": {"diffusion_stream": "canvas"}}, "text": {"diffusing": True}}
CANVASES = FORMS["canvas"]
# Random weights are sure of everything: with so low a bound few tokens are accepted.
DOUBTS = {"diffusion_entropy_bound": 0.01, "diffusion_stream": "canvas"}
# One token a canvas: an answer takes seconds.
SLOW = {"diffusion_canvas_length": 1, "diffusion_stream": "canvas"}


class Seen(NamedTuple):
    """A stream as a client reads it: the texts by choice, token ids, and canvases by choice."""

    texts: dict[int, str]
    tokens: dict[int, list[int]]
    canvases: dict[int, list[dict[str, Any]]]

    def blocks(self, index: int = 0) -> dict[int, list[dict[str, Any]]]:
        """The frames of a choice by the offset of their canvas."""
        blocks: dict[int, list[dict[str, Any]]] = {}
        for canvas in self.canvases.get(index, []):
            blocks.setdefault(canvas["offset"], []).append(canvas)
        return blocks


def read(stream: Any) -> Seen:
    seen = Seen({}, {}, {})
    for chunk in stream:
        for choice in chunk.choices:
            if canvas := getattr(choice, "canvas", None):
                seen.canvases.setdefault(choice.index, []).append(canvas)
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            seen.texts[choice.index] = seen.texts.get(choice.index, "") + (text or "")
            ids = getattr(choice, "token_ids", None) or []
            seen.tokens.setdefault(choice.index, []).extend(ids)
    return seen


# --- what is seen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [chat, complete])
def test_one_frame_for_each_denoise_step_and_the_same_answer(server, client, ask):
    steps = "vllm:diffusion_num_denoising_steps_total"
    plain = read(ask(client, stream=True))
    (before,) = server.metrics(steps)
    seen = read(ask(client, stream=True, extra_body=CANVASES))
    (after,) = server.metrics(steps)
    assert seen.texts == plain.texts and seen.tokens == plain.tokens
    assert list(seen.blocks()) == [0, CANVAS, 2 * CANVAS]
    for offset, frames in seen.blocks().items():
        assert [frame["step"] for frame in frames] == list(range(1, len(frames) + 1))
        assert [frame["final"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert frames[-1]["ids"] == plain.tokens[0][offset : offset + CANVAS]
        assert all(len(frame["entropy"]) == CANVAS for frame in frames)
    assert len(seen.canvases[0]) == after - before


def test_what_is_accepted_stays_in_the_next_step(client):
    """``accepted`` tells samples from noise: noise is drawn anew, and differs from the argmax."""
    seen = read(chat(client, stream=True, extra_body={"vllm_xargs": DOUBTS}))
    frames = [frame for frame in seen.canvases[0] if not frame["final"]]
    for frame in frames:
        assert sum(frame["accepted"]) > 0
        lowest = min(range(CANVAS), key=lambda place: frame["entropy"][place])
        assert frame["accepted"][lowest] == 1
    noise = [
        (token, best)
        for frame in frames
        for token, best, kept in zip(frame["ids"], frame["argmax"], frame["accepted"], strict=True)
        if not kept
    ]
    assert len(noise) > 20
    # 512 tokens: a random one is rarely the likeliest.
    assert sum(token == best for token, best in noise) < len(noise) / 4


def test_each_sample_of_each_prompt_has_its_own_canvases(client):
    texts = ["Sort these", "Add these"]
    whole = complete(client, texts, n=2, max_tokens=BLOCKS)
    seen = read(complete(client, texts, n=2, stream=True, extra_body=CANVASES))
    assert seen.tokens == {choice.index: choice.token_ids for choice in whole.choices}
    for index in range(4):
        for offset, frames in seen.blocks(index).items():
            assert frames[-1]["final"]
            assert frames[-1]["ids"] == seen.tokens[index][offset : offset + CANVAS]


def test_a_client_that_replaces_content_ends_with_the_answer(client):
    doubts = {"vllm_xargs": {"diffusion_entropy_bound": 0.01}}
    whole = chat(client, extra_body=doubts).choices[0].message.content
    contents, progress = [], []
    for chunk in chat(client, stream=True, extra_body=FORMS["text"] | doubts):
        contents.append(chunk.choices[0].delta.content)
        progress.append(chunk.diffusion_meta["diffusion_progress"])
    assert contents[-1] == whole
    assert len(contents) > 5 and len(set(contents)) > 3
    assert 0 < min(progress) < 1 and progress[-1] == 1


def test_frames_of_a_step_are_fewer_and_end_alike(client):
    # Canvases of many denoise steps, of which one engine step takes several (denoise_loop_ms).
    each = read(chat(client, stream=True, extra_body={"vllm_xargs": DOUBTS}))
    every = DOUBTS | {"diffusion_stream_every": "visit"}
    some = read(chat(client, stream=True, extra_body={"vllm_xargs": every}))
    assert some.texts == each.texts
    assert len(some.canvases[0]) < len(each.canvases[0])
    for offset, frames in some.blocks().items():
        assert all(frame in each.blocks()[offset] for frame in frames)
        assert frames[-1]["final"]


def test_the_openai_stream_helper_reads_it(client):
    messages = [{"role": "user", "content": "Sort these numbers"}]
    options: Any = dict(model=MODEL, messages=messages, max_tokens=40, seed=1)
    with client.chat.completions.stream(**options, extra_body=CANVASES) as stream:
        final = stream.get_final_completion()
    plain = client.chat.completions.create(**options)
    assert final.choices[0].message.content == plain.choices[0].message.content
    assert final.choices[0].finish_reason == plain.choices[0].finish_reason


# --- what is not changed by it --------------------------------------------------------------------


def test_metrics_do_not_count_frames_as_tokens(server, client):
    names = [
        f"vllm:{name}_count"
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    ]
    names += ["vllm:generation_tokens_total", "vllm:request_success_total"]

    def added(**extra: Any) -> list[float]:
        before = server.metrics(*names)
        read(chat(client, stream=True, extra_body=extra))
        return [after - old for old, after in zip(before, server.metrics(*names), strict=True)]

    plain = added()
    assert plain[0] == 1 and plain[2] == BLOCKS
    assert added(**CANVASES) == plain


# --- clients that leave, or do not read -----------------------------------------------------------


def open_slow(server: Server, max_tokens: int = 400) -> http.client.HTTPResponse:
    """A stream that the client has not begun to read."""
    body = {
        "model": MODEL,
        "prompt": "Sort these",
        "max_tokens": max_tokens,
        "stream": True,
        "seed": 1,
        "ignore_eos": True,
        "vllm_xargs": SLOW,
    }
    return server.sent(COMPLETIONS, body).getresponse()


def test_a_watcher_that_leaves_ends_its_request(server, client):
    stream = complete(client, max_tokens=400, stream=True, extra_body={"vllm_xargs": SLOW})
    for chunk in stream:
        if getattr(chunk.choices[0], "canvas", None):
            break
    stream.close()
    complete(client, max_tokens=1)  # a request behind it, so that the scheduler counts again
    assert server.metrics(RUNNING) == [0]


def test_a_watcher_that_does_not_read_misses_frames_and_slows_nobody(server, client):
    narrow = {"vllm_xargs": {"diffusion_canvas_length": 1}}
    expected = complete(client, "Sort these", max_tokens=400, extra_body=narrow).choices[0].text
    stalled = open_slow(server)
    for _ in range(3):
        complete(client, max_tokens=BLOCKS)
    events = [line[6:] for line in stalled.read().decode().splitlines() if line[:7] == "data: {"]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert "".join(choice["text"] for choice in choices) == expected
    finals = [choice["canvas"]["offset"] for choice in choices if "canvas" in choice]
    assert finals == sorted(finals)
    assert stalled.status == 200


def test_too_many_watchers_are_refused_and_others_are_not(server, client):
    streams = [open_slow(server) for _ in range(MAX_WATCHERS)]
    try:
        assert all(stream.status == 200 for stream in streams)
        with pytest.raises(openai.RateLimitError, match=f"{MAX_WATCHERS} canvas streams") as error:
            chat(client, stream=True, extra_body=CANVASES)
        assert error.value.param == "diffusion_stream"
    finally:
        for stream in streams:
            stream.close()
    assert read(chat(client, stream=True)).texts  # vLLM's own streams are not counted
    deadline = time.monotonic() + HANG_S
    while True:  # the server has to notice that they are gone
        try:
            seen = read(chat(client, max_tokens=CANVAS, stream=True, extra_body=CANVASES))
        except openai.RateLimitError:
            assert time.monotonic() < deadline
        else:
            break
    assert seen.canvases


def test_there_is_no_page_where_nobody_asks_for_it(server):
    with openai.DefaultHttpxClient() as http_client:
        answer = http_client.get(f"{server.url}/canvas")
    assert answer.status_code == 404 and "VLLM_PLUGINS=dllm," in answer.text


# --- traces ---------------------------------------------------------------------------------------

TRACED = {"diffusion_trace": ["entropy", "behind_stop"]}


def joined(traces: list[Any]) -> dict[str, Any]:
    """The trace of an answer from those of its blocks."""
    whole: dict[str, Any] = {}
    for trace in traces:
        for name, values in trace.items():
            whole[name] = whole[name] + values if name in whole else values
    return whole


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("form", [None, "canvas", "text"])
def test_traces_of_a_stream_are_those_of_the_answer(client, ask, form):
    options = dict(n=2, max_tokens=CANVAS + 5)
    whole = ask(client, extra_body={"vllm_xargs": TRACED}, **options)
    shown = TRACED | ({} if form is None else {"diffusion_stream": form})
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in ask(client, stream=True, extra_body={"vllm_xargs": shown}, **options):
        for choice in chunk.choices:
            if trace := getattr(choice, "diffusion_trace", None):
                seen[choice.index].append(trace)
    for choice in whole.choices:
        trace = choice.diffusion_trace
        assert trace == joined(seen[choice.index])
        assert trace["token_ids"] == choice.token_ids and trace["block_lengths"] == [CANVAS, 5]
        assert len(trace["behind_stop"]["reveal_steps"]) == CANVAS - 5
        assert all(number <= 0 for number in trace["logprobs"] + trace["sampling_logprobs"])
        assert min(trace["entropies"]) >= 0 and max(trace["reveal_steps"]) <= max(
            trace["block_passes"]
        )


def test_each_sample_of_each_prompt_has_its_own_trace(client):
    texts = ["Sort these", "Add these"]
    extra = {"vllm_xargs": {"diffusion_trace": True}}
    answer = complete(client, texts, n=2, extra_body=extra)
    traces = [choice.diffusion_trace for choice in answer.choices]
    assert [trace["token_ids"] for trace in traces] == [one.token_ids for one in answer.choices]
    assert all("entropies" not in trace and "behind_stop" not in trace for trace in traces)
