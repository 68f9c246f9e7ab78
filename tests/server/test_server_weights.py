"""New weights over vLLM's own routes while requests run, which finish or are told."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.tasks.suite import questions
from tests.support.server_harness import FLAGS, MODEL, Server

pytestmark = pytest.mark.slow

TINY_DLLM = Path(__file__).parents[2] / "checkpoints/tiny-dllm"
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-dllm with each weight a little different."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(TINY_DLLM, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = (weight.float() * (1 + 0.15 * noise)).to(weight.dtype)
        save_file(weights, path)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("weights") / "log"
    with Server(TINY_DLLM, log, FLAGS, DEVELOPMENT) as running:
        running.wait_until_ready()
        yield running


def answers(server: Server) -> list[str]:
    """Of a hard question greedily, and of an easy one by seed, with prefixes that get cached."""
    asked = [one.prompt for one in questions(["sort", "extract"], "heldout", 3, 0)]
    found = []
    for seed, question in enumerate(asked):
        chat = server.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            temperature=0 if seed % 2 else 2.0,
            seed=seed,
        )
        found.append(str(chat.choices[0].message.content))
    return found


def post(server: Server, path: str, body: Any = None) -> Any:
    reply = server.post(path, {} if body is None else body)
    assert reply.status == 200, reply
    return json.loads(reply.text) if reply.text else None


def load(server: Server, folder: Path) -> None:
    post(
        server,
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
    )


@pytest.fixture(scope="module")
def fresh(other: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a server says that was started with the other weights."""
    with Server(other, tmp_path_factory.mktemp("fresh") / "log") as running:
        running.wait_until_ready()
        return answers(running)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_weights_change_under_load(
    server: Server, other: Path, fresh: list[str], mode: str
) -> None:
    """``abort`` tells those that are running, ``wait`` lets them finish, ``keep`` holds them."""
    load(server, TINY_DLLM)
    post(server, "/reset_prefix_cache")
    before = answers(server)
    assert before != fresh
    streams = [started(server, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(end, stream) for stream in streams]
        post(server, f"/pause?mode={mode}")
        load(server, other)
        # Those that were held go on from their text, read with the new weights.
        held = "true" if mode == "keep" else "false"
        done = post(server, f"/reset_prefix_cache?reset_running_requests={held}")
        assert done == {"success": True}
        post(server, "/resume")
        ends = [each.result() for each in running]
    told = {reason for reason, _ in ends} - {"length"}  # the first ones may have ended before
    assert told == ({"abort"} if mode == "abort" else set())
    assert {count for reason, count in ends if reason == "length"} <= {400}
    assert answers(server) == fresh
    load(server, TINY_DLLM)
    post(server, "/reset_prefix_cache")
    assert answers(server) == before


def started(server: Server, seed: int) -> Any:
    """A stream of 400 tokens whose first event has come."""
    stream = server.client().completions.create(
        model=MODEL,
        prompt="Count the letters.",
        max_tokens=400,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        # As many denoise steps as a block may have, so that none ends before the weights change.
        extra_body={"ignore_eos": True, "vllm_xargs": {"diffusion_entropy_bound": 1e-6}},
    )
    next(stream)
    return stream


def end(stream: Any) -> tuple[str, int]:
    """How it ends, and with how many tokens."""
    *chunks, usage = stream
    return chunks[-1].choices[0].finish_reason, usage.usage.completion_tokens
