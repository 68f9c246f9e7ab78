"""Unread frames: how many are kept, who gets them, and what happens when a client leaves."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from dllm.api.watching import MAX_UNREAD, CanvasFeed, Pace, Watchers, has_frames, interleaved
from dllm.engine.frames import Frame, FrameMail, StepFrames
from tests.support.clock import Clock

WIDTH = 4


def frame(step: int = 1, is_final: bool = False, offset: int = 0) -> Frame:
    ids = np.arange(WIDTH, dtype=np.int32)
    return Frame(offset, step, is_final, ids, ids, np.zeros(WIDTH, np.float32), ids > 1)


def packed(start: int = 10, step: int = 1, width: int = WIDTH, is_final: bool = False) -> Any:
    rows = np.arange(4 * (WIDTH + 1), dtype=np.float32).reshape(4, WIDTH + 1)
    rows[3, :-1] = [1, 0, 1, 0]
    rows[:, -1] = [start, step, width, is_final]
    return rows


def requests(*names: str, server: int = 0) -> dict[str, Any]:
    about = dict(num_prompt_tokens=7, client_index=server, sampling_params=SamplingParams())
    return {name: SimpleNamespace(**about) for name in names}


STATES: dict[str, Any] = {}  # of vLLM's output processor


def watchers(limit: int = 2) -> Watchers:
    STATES.clear()
    return Watchers(SimpleNamespace(request_states=STATES), limit)


def start(several: Watchers, feed: CanvasFeed, *names: str, sent: str | None = None) -> None:
    """Start a request for each name, with two samples "NAME/0" and "NAME/1".

    sent: the id that the client sends with all of them; None: their names.
    """
    for name in names:
        external = several.start(sent or name, feed)
        for index in range(2):
            state = SimpleNamespace(external_req_id=external, request_index=index)
            STATES[f"{name}/{index}"] = state


class Steps:
    """Writes the step of a frame, and vLLM's lines as they are."""

    def frame(self, choice: int, frame: Frame) -> str:
        return f"{choice}:{frame.step}"

    def own(self, line: str) -> str:
        return line


def read(lines: Any, feed: CanvasFeed) -> list[str]:
    """All lines of a stream."""

    async def all_lines() -> list[str]:
        return [line async for line in interleaved(lines, feed, Steps())]

    return asyncio.run(all_lines())


def mailed(
    *steps: StepFrames, of: dict[str, Any], emits: tuple[str, ...] = ()
) -> dict[int, EngineCoreOutputs]:
    """The messages for each API server, where some requests of the first one emit a token."""
    tokens = [EngineCoreOutput(request_id=name, new_token_ids=[5]) for name in emits]
    outputs = {0: EngineCoreOutputs(outputs=tokens)} if tokens else {}
    FrameMail(steps, of).add_to(outputs)
    return outputs


# --- how many -------------------------------------------------------------------------------------


def test_as_many_as_the_rate_at_once_and_then_one_for_each_period():
    clock = Clock()
    pace = Pace(10, clock)
    assert [pace.allows(False) for _ in range(12)] == [True] * 10 + [False] * 2
    sent = 0
    for _ in range(1000):
        clock.now += 0.01
        sent += pace.allows(False)
    assert sent == pytest.approx(100, abs=1)  # 10 seconds


def test_the_last_frame_of_a_canvas_is_always_sent_and_counts():
    clock = Clock()
    pace = Pace(1, clock)
    assert [pace.allows(True) for _ in range(3)] == [True] * 3
    clock.now = 2.9  # three were sent, one a second
    assert not pace.allows(False)
    clock.now = 3.1
    assert pace.allows(False)


def test_a_feed_keeps_the_newest():
    feed = CanvasFeed(Pace(1000), 1)
    for step in range(MAX_UNREAD + 5):
        feed.put(0, frame(step))
    assert [unread.step for _, unread in feed.take()] == list(range(5, MAX_UNREAD + 5))
    assert feed.take() == [] and not feed.bell.is_set()
    for step in range(2 * MAX_UNREAD):  # which hold traces
        feed.put(0, frame(step, is_final=step < MAX_UNREAD))
    assert len(feed.take()) == 2 * MAX_UNREAD


def test_a_place_is_free_again_when_its_stream_is_gone_or_has_ended():
    several = watchers(limit=2)
    first, second = several.open(30, True, 1), several.open(30, True, 1)
    assert first and second and several.open(30, True, 1) is None
    del first
    gc.collect()
    assert several.open(30, True, 1) is not None
    assert all(several.open(30, False, 1) for _ in range(9))  # which show no canvases

    async def lines() -> Any:
        yield "only"

    assert read(lines(), second) == ["only"]
    assert not second.is_open and several.open(30, True, 1) is not None  # whoever still holds it


# --- from the worker's answer to the feed ---------------------------------------------------------


def test_frames_reach_the_choice_that_they_belong_to():
    several = watchers()
    feed = several.open(30, True, 2)
    start(several, feed, "a", "b")  # the prompts of one completion
    step = StepFrames(["a/1", "b/0"], ["pass"] * 2, np.stack([packed(12), packed(9, 3, 2, True)]))
    outputs = mailed(step, of=requests("a/1", "b/0"), emits=("b/0",))
    token = outputs[0].outputs[0]
    assert has_frames(outputs[0].outputs)
    several.deliver(outputs[0])
    assert outputs[0].outputs == [token]  # all that vLLM gets to see
    (one, first), (other, second) = feed.take()
    assert (one, first.offset, first.step, first.is_final) == (1, 5, 1, False)
    assert first.canvas.tolist() == [0, 1, 2, 3] and first.argmax.tolist() == [5, 6, 7, 8]
    assert first.entropy.tolist() == [10, 11, 12, 13]
    assert first.accepted.tolist() == [True, False, True, False]
    assert (other, second.offset, second.step, second.is_final) == (2, 2, 3, True)
    assert second.canvas.tolist() == [0, 1]  # of the request's own width


def test_nobody_sees_the_frames_of_another_who_sent_the_same_id():
    several = watchers()
    feeds = {name: several.open(30, True, 1) for name in ("mine", "theirs")}
    for name, feed in feeds.items():
        start(several, feed, name, sent="same")
    names = [f"{name}/0" for name in feeds]
    step = StepFrames(names, ["pass"] * 2, np.stack([packed(step=1), packed(step=2)]))
    several.deliver(mailed(step, of=requests(*names))[0])
    seen = {name: [frame.step for _, frame in feed.take()] for name, feed in feeds.items()}
    assert seen == {"mine": [1], "theirs": [2]}


def test_frames_of_a_step_come_once_to_those_who_want_them_once():
    steps = [
        StepFrames(["a", "b"], ["pass", "visit"], np.stack([packed(step=n), packed(step=n)]))
        for n in (1, 2, 3)
    ]
    outputs = mailed(*steps, of=requests("a", "b"))
    seen = [
        (output.request_id, output.kv_transfer_params["dllm_frame"]["step"])
        for output in outputs[0].outputs
    ]
    assert seen == [("a", 1), ("a", 2), ("a", 3), ("b", 3)]


def test_a_block_that_vllm_has_dropped_has_no_last_frame():
    """Asynchronous scheduling: the request was reset while the block was in flight."""
    step = StepFrames(["a"], ["pass"], packed(is_final=True)[None])
    assert mailed(step, of=requests("a")) == {}


def test_each_api_server_gets_the_frames_of_its_requests_and_aborted_ones_have_none():
    step = StepFrames(["a", "b", "gone"], ["pass"] * 3, np.stack([packed()] * 3))
    outputs = mailed(step, of=requests("a", server=0) | requests("b", server=3))
    assert {server: [o.request_id for o in of.outputs] for server, of in outputs.items()} == {
        0: ["a"],
        3: ["b"],
    }


def test_frames_of_an_ended_stream_are_dropped():
    several = watchers()
    feed = several.open(30, True, 1)
    start(several, feed, "a")
    del feed
    gc.collect()
    outputs = mailed(StepFrames(["a/0"], ["pass"], packed()[None]), of=requests("a/0"))
    several.deliver(outputs[0])
    assert outputs[0].outputs == []


# --- the stream -----------------------------------------------------------------------------------


def test_frames_come_in_front_of_the_line_that_followed_them():
    feed = CanvasFeed(Pace(30), 1)

    async def lines() -> Any:
        feed.put(0, frame(1))
        feed.put(1, frame(2))
        yield "first"
        feed.put(0, frame(3))
        yield "second"

    assert read(lines(), feed) == ["0:1", "1:2", "first", "0:3", "second"]


def test_a_frame_does_not_wait_for_a_line_and_leaving_closes_the_lines():
    async def run() -> list[str]:
        feed, closed = CanvasFeed(Pace(30), 1), []

        async def lines() -> Any:
            try:
                await asyncio.Event().wait()  # for ever
                yield "never"
            finally:
                closed.append("closed")

        stream = interleaved(lines(), feed, Steps())
        feed.put(0, frame(1))
        got = [await anext(stream)]
        feed.put(0, frame(2))
        got.append(await anext(stream))
        await stream.aclose()
        return got + closed

    assert asyncio.run(run()) == ["0:1", "0:2", "closed"]


def test_an_error_in_the_lines_is_the_clients():
    async def lines() -> Any:
        raise RuntimeError("engine died")
        yield

    with pytest.raises(RuntimeError, match="engine died"):
        read(lines(), CanvasFeed(Pace(30), 1))
