"""A target server and two draft workers, started as a user starts them, while workers fail."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.toys.suite import questions
from dllm.patches.drafts import REMOTE_DRAFTS
from tests.support.draft_workers import WorkerProcess
from tests.support.drafter_harness import greedy, plain_engine
from tests.support.server_harness import Server
from tests.support.toy_prompts import encode_prompt

pytestmark = pytest.mark.slow

TARGET = Path(__file__).parents[2] / "checkpoints" / "tiny-ar"
NUM_REQUESTS, NUM_TOKENS, AT_ONCE = 200, 12, 4
DEADLINE_MS = 10_000  # the longest: a worker that waits for a busy machine does not miss it


def flags(**where: object) -> list[str]:
    """Of a target; ``where`` says how it finds its workers."""
    remote = {"policy": "fixed", "deadline_ms": DEADLINE_MS} | where
    speculative = {"method": "custom_class", "model": REMOTE_DRAFTS, "num_speculative_tokens": 4}
    return [
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=512",
        f"--max-num-seqs={AT_ONCE}",
        f"--speculative-config={json.dumps(speculative)}",
        f"--additional-config={json.dumps({'dllm': {'remote': remote}})}",
    ]


class Story:
    """What the metrics say, by name and the value of their own label."""

    def __init__(self, server: Server) -> None:
        pattern = r'^dllm:(\w+)\{.*worker="([^"]*)".*\} (\S+)$'
        found = re.findall(pattern, server.get("/metrics").text, re.MULTILINE)
        self.found = {(name, label): float(value) for name, label, value in found}

    def __getitem__(self, key: tuple[str, str]) -> float:
        return self.found.get(key, 0.0)

    def up(self, addresses: Sequence[str]) -> list[float]:
        """Which of these workers are waited for."""
        return [self["remote_worker_up", each] for each in addresses]


def heldout_prompts() -> list[list[int]]:
    """Held-out questions, as token ids."""
    asked = questions(("schema", "extract", "report", "edit"), "heldout", NUM_REQUESTS // 4)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [encode_prompt(tokenizer, each.prompt) for each in asked]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return heldout_prompts()


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    """What the target writes without drafts."""
    return plain_engine(TARGET).generate(prompts, greedy(NUM_TOKENS))


@pytest.fixture
def workers(tmp_path) -> Iterator[list[WorkerProcess]]:
    with (
        WorkerProcess(TARGET, tmp_path / "first.log") as first,
        WorkerProcess(TARGET, tmp_path / "second.log") as second,
    ):
        yield [first, second]


def answer(server: Server, prompt: list[int]) -> list[int]:
    body = {"model": str(TARGET), "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return server.ask("/v1/completions", body)["choices"][0]["token_ids"]


def test_one_worker_is_killed_and_another_hangs_in_the_middle_of_200_requests(
    prompts, expected, workers, tmp_path
):
    first, second = (worker.wait_until_ready() for worker in workers)
    addresses = first.address, second.address
    with (
        Server(TARGET, tmp_path / "server.log", flags(workers=addresses)) as server,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        server.wait_until_ready()
        answers: list[Future[list[int]]] = []

        def ask(count: int, up: list[float]) -> Story:
            """Ask so many more; returns when these workers are asked, or out, behind most of them.

            However long that takes: what a step counts is known behind a later one, and a worker
            may have to wait for the machine.
            """
            rest = prompts[len(answers) : len(answers) + count]
            answers.extend(pool.submit(answer, server, prompt) for prompt in rest)
            answers[-2 * AT_ONCE].result()
            while (story := Story(server)).up(addresses) != up:
                assert answer(server, prompts[0]) == expected[0]
            return story

        both = ask(60, up=[1, 1])
        first.kill()  # with requests in flight
        one = ask(50, up=[0, 1])
        second.pause()
        nobody = ask(40, up=[0, 0])
        second.go_on()
        with WorkerProcess(TARGET, tmp_path / "third.log", listen=addresses[0]) as third:
            third.wait_until_ready()
            ask(50, up=[1, 1])
            assert [each.result() for each in answers] == expected  # nothing lost, nothing wrong
            assert len(answers) == NUM_REQUESTS
            end = Story(server)
    for address in addresses:
        assert both["remote_replies_total", address] > 20
    asks = [story["remote_asks_total", addresses[0]] for story in (one, nobody)]
    assert asks[0] == asks[1]  # nobody asks who is dead
    misses = [story["remote_misses_total", addresses[1]] for story in (one, nobody)]
    assert misses[1] == misses[0] + 1
    drafts = [
        sum(story["remote_drafts_total", address] for address in addresses)
        for story in (both, one, nobody, end)
    ]
    assert drafts[1] > drafts[0] > 60 * NUM_TOKENS / 3
    assert drafts[3] > drafts[2] + 100  # drafts are back
