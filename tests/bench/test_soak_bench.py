"""The soak campaign: its pieces, and all of it against a server that only pretends."""

import asyncio
import json
import os
import subprocess
import sys
from itertools import count
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import soak, soak_load
from bench.soak import RUDELY, Campaign
from bench.soak_load import COMPLETIONS, GOOD, Answer, Request

# --- requests -------------------------------------------------------------------------------------


def choice(text, ids, end):
    return {"index": 0, "text": text, "token_ids": ids, "finish_reason": end}


EVENTS = [{"choices": [choice("a ", [5], None)]}, {"choices": [choice("b", [6], "stop")]}]


@pytest.mark.parametrize(
    ("events", "answer"),
    [
        (EVENTS, Answer(200, (("a b", (5, 6), "stop"),))),
        (
            EVENTS[:1],
            Answer(200, (("a ", (5,), ""),), "the stream ended without a finish reason"),
        ),
        ([*EVENTS, {"error": {"message": "dead"}}], Answer(0, problem="{'message': 'dead'}")),
        ([{"answers": [{"p": 0.5}]}], Answer(200, (('{"p": 0.5}', (), ""),))),
    ],
)
def test_a_stream_is_joined_and_an_incomplete_one_is_no_answer(events, answer):
    assert soak_load.joined(events) == answer
    assert answer.is_good == (answer.problem == "")


def test_of_a_call_its_name_and_arguments_are_compared_and_not_its_id():
    def called(number):
        function = {"name": "add", "arguments": '{"a": 1}'}
        message = {"reasoning": "Hm.", "content": None, "tool_calls": [{"id": number}]}
        message["tool_calls"][0]["function"] = function
        return [{"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}]

    answer = soak_load.joined(called(1))
    assert answer == soak_load.joined(called(2)) and answer.is_good
    ((text, _, _),) = answer.choices
    assert text == 'Hm.[{"name": "add", "arguments": "{\\"a\\": 1}"}]'


# --- the campaign ---------------------------------------------------------------------------------


class Clock:
    """The campaign's time, which passes with each request that the server answers."""

    REQUESTS_PER_S = 100

    def __init__(self):
        self.num_requests = 0

    def monotonic(self):
        return self.num_requests / self.REQUESTS_PER_S

    perf_counter = monotonic


def campaign(answer, monkeypatch, num_requests):
    """A campaign against an HTTP server whose completions are ``answer(body)``."""
    clock, found = Clock(), Campaign("m", GOOD, seed=3)
    monkeypatch.setattr(soak, "time", clock)

    async def reply(request):
        clock.num_requests += 1
        body = await request.json()
        status, text = answer(body)
        event = {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
        if not body.get("stream"):
            return web.json_response(event, status=status)
        return web.Response(status=status, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    async def run():
        app = web.Application()
        app.router.add_post("/v1/{rest:.*}", reply)
        seconds = num_requests / clock.REQUESTS_PER_S
        async with TestServer(app) as server:
            await found.run(str(server.make_url("/")), os.getpid(), seconds)

    asyncio.run(run())
    return found


def wrong(found):
    """What the exit code says."""
    return [row["what"] for row in found.rows() if row["what"] in soak.WRONG and row["value"]]


@pytest.fixture
def quick(monkeypatch):
    """A campaign of little work, without clients that wait for seconds on purpose."""
    monkeypatch.setattr(soak, "WARM_UP", 4)
    monkeypatch.setattr(soak, "RUDE_PAUSE_S", 1e-3)
    monkeypatch.setattr(soak, "HEAVY_PAUSE_S", 1e-3)
    monkeypatch.setattr(soak, "SAMPLE_S", 1e-3)
    monkeypatch.setattr(soak, "RUDE", {"refused": soak_load.refused})
    monkeypatch.setattr(soak, "HEAVY", {"burst over capacity": soak_load.burst})


def test_a_campaign_against_a_good_server_is_clean(quick, monkeypatch):
    found = campaign(lambda body: (200, f"{body.get('seed')}"), monkeypatch, 400)
    assert not wrong(found)
    num_good = sum(map(len, found.latencies.values()))
    assert num_good >= 100 and len(found.shadows) == num_good // 10
    sent = {part for what, part in found.counts if what == "requests"}
    assert set(found.silence) == set(soak.PHASES)
    kinds = {"calm: conversation", "rude: refused", "everything: burst over capacity"}
    assert kinds <= sent and "calm: refused" not in sent


def test_other_tokens_in_a_replay_are_found(quick, monkeypatch):
    numbers = count()
    found = campaign(lambda body: (200, f"{next(numbers)}"), monkeypatch, 400)
    assert found.counts[soak.DIFFERENT] == len(found.shadows) > 0 and wrong(found) == [
        "other tokens"
    ]


def test_statuses_of_500_are_failures_and_refusals_of_hostile_requests_are_not():
    found = Campaign("m", GOOD, 0)
    found.answered(Request("question", COMPLETIONS, {}), Answer(400, problem="no"), 1.0)
    found.phase = RUDELY
    found.got("refused", [400, 200, 500])
    found.got("aborted", [])
    counts = {each: n for each, n in found.counts.items() if n}
    sent = {"rude: refused": 3, "rude: aborted": 1, "calm: question": 1}
    failed = {"rude: refused": 1, "calm: question": 1}
    assert counts == {("requests", part): n for part, n in sent.items()} | {
        ("failed", part): n for part, n in failed.items()
    }
    assert found.problems == ["question: HTTP 400 no", "refused: HTTP 500"]


def test_a_traceback_in_the_log_is_found():
    found = Campaign("m", GOOD, 0)
    broken = "ERROR dllm: the model's output is not finite (request a)"
    found.read_log(f"fine\nTraceback (most recent call last):\n  File x\nValueError: bad\n{broken}")
    assert found.counts[soak.BROKEN] == 1
    assert found.counts[soak.TRACEBACKS] == 1 and found.problems == ["log: ValueError: bad"]


def test_the_processes_of_a_server_are_sampled_by_their_titles():
    said = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["VLLM::EngineCore", "-c", said],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"up\n"
        (found,) = soak.sample(child.pid)
        child.stdin.close()
    memory, descriptors, threads, sockets = found.held
    assert found.process == "engine core"
    assert memory > 1 and descriptors >= 3 and threads == 1 and sockets == 0


# --- numbers --------------------------------------------------------------------------------------


def test_the_slope_of_a_line_and_of_noise():
    seconds = [2.0 * number for number in range(200)]
    value, low, high = soak.slope(seconds, [5 + second / 60 for second in seconds])
    assert value == pytest.approx(60) and low == pytest.approx(60) == pytest.approx(high)
    dice = Random(0)
    inside = 0
    for _ in range(200):
        _, low, high = soak.slope(seconds, [dice.gauss(0, 1) for _ in seconds])
        inside += low <= 0 <= high
    assert 180 <= inside <= 199  # of 95%
    assert soak.slope(seconds[:30], seconds[:30]) is None
