"""Two replicas, two API servers with two ranks, on a CPU: the answers are those of one server."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.test_server import complete, prompt, tokens
from tests.server.test_server_mixed import ask, assert_same
from tests.server.test_server_stream import CANVASES, read
from tests.support.server_harness import CANVAS, FLAGS, Server, serving

pytest_plugins = ["tests.support.server_harness"]

pytestmark = pytest.mark.nightly

NUM_REQUESTS = 32
RANK = "X-data-parallel-rank"  # vLLM's header: which replica answers


@pytest.fixture(scope="module")
def replicas(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from serving(checkpoint(), tmp_path_factory, (*FLAGS, "--data-parallel-size=2"))


def num_answered(server: Server) -> list[float]:
    """Requests that each replica has answered."""
    counts, text = [0.0, 0.0], server.get("/metrics").text
    pattern = r'^vllm:request_success_total\{engine="(\d)".*\} (\S+)$'
    for engine, count in re.findall(pattern, text, re.MULTILINE):
        counts[int(engine)] += float(count)
    return counts


def test_many_requests_at_once_use_both_and_get_the_answers_of_one(server, replicas):
    single, both = server.client(), replicas.client()
    before = num_answered(replicas)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda index: ask(both, index), range(NUM_REQUESTS)))
    used = [now - then for now, then in zip(num_answered(replicas), before, strict=True)]
    for index in range(NUM_REQUESTS):
        assert_same(answers[index], ask(single, index))
    assert sum(used) >= NUM_REQUESTS and min(used) >= 8, used


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_answers_while_the_other_has_nothing_to_do(server, replicas, replica):
    before = num_answered(replicas)
    client = replicas.client().with_options(default_headers={RANK: str(replica)})
    for length in (4, 200):
        expected = tokens(complete(server.client(), prompt(length)))
        assert tokens(complete(client, prompt(length))) == expected
        seen = read(complete(client, prompt(length), stream=True, extra_body=CANVASES))
        assert seen.tokens[0] == expected
        for offset, frames in seen.blocks().items():
            assert frames[-1]["final"] and frames[-1]["ids"] == expected[offset : offset + CANVAS]
    used = [now - then for now, then in zip(num_answered(replicas), before, strict=True)]
    assert used[replica] == 4 and used[1 - replica] == 0


def test_each_api_server_streams_the_canvases_of_its_own_requests(checkpoint, tmp_path):
    parallel = ("--tensor-parallel-size=2", "--api-server-count=2")
    with Server(checkpoint(), tmp_path / "log", (*FLAGS, *parallel)) as server:
        server.wait_until_ready()
        client = server.client()
        contexts = [prompt(length) for length in (4, 9, 30, 60)] * 2
        with ThreadPoolExecutor(6) as pool:  # connections spread over the API servers
            plain = list(pool.map(lambda one: complete(client, one), contexts))
            seen = list(
                pool.map(
                    lambda one: read(complete(client, one, stream=True, extra_body=CANVASES)),
                    contexts,
                )
            )
    for expected, stream in zip(plain, seen, strict=True):
        tokens = expected.choices[0].token_ids
        assert stream.tokens[0] == tokens
        for offset, frames in stream.blocks().items():
            assert [frame["step"] for frame in frames] == list(range(1, len(frames) + 1))
            assert frames[-1]["final"] and frames[-1]["ids"] == tokens[offset : offset + CANVAS]
