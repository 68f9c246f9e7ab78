"""Two replicas behind vLLM's own balancing, on a CPU: the answers are those of one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.server.test_server import complete, prompt, tokens
from tests.server.test_server_stream import CANVASES, read
from tests.support.server_harness import CANVAS, FLAGS, Server, serving

pytest_plugins = ["tests.support.server_harness"]

NUM_REQUESTS = 32
RANK = "X-data-parallel-rank"  # vLLM's header: which replica answers


@pytest.fixture(scope="module")
def replicas(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from serving(checkpoint(), tmp_path_factory, (*FLAGS, "--data-parallel-size=2"))


def num_answered(server: Server) -> list[float]:
    """Requests that each replica has answered."""
    return server.metrics(*(f'vllm:request_success_total{{engine="{rank}".*' for rank in "01"))


def test_many_requests_at_once_use_both_and_get_the_answers_of_one(server, replicas):
    single, both = server.client(), replicas.client()
    before = num_answered(replicas)

    def ask(client: openai.OpenAI, index: int) -> list[int]:
        return tokens(complete(client, prompt(5 + 4 * index, salt=index), seed=index))

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda index: ask(both, index), range(NUM_REQUESTS)))
    used = [now - then for now, then in zip(num_answered(replicas), before, strict=True)]
    assert answers == [ask(single, index) for index in range(NUM_REQUESTS)]
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
