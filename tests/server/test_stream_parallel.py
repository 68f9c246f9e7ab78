"""Canvas streams of a server with two API servers and two tensor-parallel workers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.test_server import complete, prompt
from tests.server.test_server_stream import CANVASES, read
from tests.support.server_harness import CANVAS, FLAGS, Server

pytestmark = pytest.mark.slow

PARALLEL = ("--tensor-parallel-size=2", "--api-server-count=2")


def test_each_api_server_streams_the_canvases_of_its_own_requests(checkpoint, tmp_path):
    with Server(checkpoint(), tmp_path / "log", (*FLAGS, *PARALLEL)) as server:
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
