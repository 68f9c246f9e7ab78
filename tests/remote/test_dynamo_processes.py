"""A target server and draft workers that find each other by NVIDIA Dynamo, and come and go."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.remote.test_remote_processes import (
    AT_ONCE,
    NUM_TOKENS,
    TARGET,
    Story,
    answer,
    flags,
    heldout_prompts,
)
from tests.support.draft_workers import WorkerProcess
from tests.support.drafter_harness import greedy, plain_engine
from tests.support.dynamo import needs_dynamo, wait_for
from tests.support.server_harness import Server

pytestmark = [pytest.mark.slow, needs_dynamo]

LISTED = ("--discovery", "dynamo")


def test_a_server_follows_workers_that_come_and_go(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "list"))
    prompts = heldout_prompts()[:80]
    expected = plain_engine(TARGET).generate(prompts, greedy(NUM_TOKENS))
    wrong: list[int] = []
    with (
        WorkerProcess(TARGET, tmp_path / "first.log", *LISTED) as first,
        Server(TARGET, tmp_path / "server.log", flags(discovery="dynamo")) as server,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def ask() -> Story:
            """Ask everything; what the metrics say then."""
            answers = list(pool.map(lambda prompt: answer(server, prompt), prompts))
            wrong.extend(a != b for a, b in zip(answers, expected, strict=True))
            return Story(server)

        first.wait_until_ready()
        server.wait_until_ready()

        def workers() -> set[str]:
            """Addresses that the server has; the step of this request asks for the list."""
            answer(server, prompts[0])
            found = Story(server).found
            return {label for name, label in found if name == "remote_worker_up"}

        wait_for(lambda: workers() == {first.address})
        one = ask()
        with WorkerProcess(TARGET, tmp_path / "second.log", *LISTED) as second:
            second.wait_until_ready()
            wait_for(lambda: workers() == {first.address, second.address})
            both = ask()
            first.kill()
            wait_for(lambda: workers() == {second.address})
            rest = ask()
        wait_for(lambda: workers() == set())
    assert not any(wrong) and len(wrong) == 3 * len(prompts)
    assert one["remote_drafts_total", first.address] > len(prompts) * NUM_TOKENS / 3
    for address in (first.address, second.address):
        assert both["remote_replies_total", address] > 20
    assert (
        rest["remote_replies_total", second.address] > both["remote_replies_total", second.address]
    )
    assert rest["remote_worker_up", second.address] == 1
