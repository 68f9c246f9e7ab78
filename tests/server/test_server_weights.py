"""New weights over vLLM's own routes while requests run, which finish or are told."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from bench.toys.suite import questions
from dllm.settings import vllm_names
from tests.support.edited import edited
from tests.support.engine_harness import get_engine
from tests.support.server_harness import CHECKPOINTS, FLAGS, MODEL, Reply, Server, serving

pytestmark = pytest.mark.slow

TINY_DLLM = CHECKPOINTS / "tiny-dllm"
# Every second one is asked greedily; their common prefix gets cached.
CHATS = [
    [{"role": "user", "content": one.prompt}]
    for one in questions(["sort", "extract"], "heldout", 3, 0)
]
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 64, "temperature": 0 if seed % 2 else 2.0, "seed": seed}
    for seed in range(len(CHATS))
]
MAX_TOKENS = 192  # of a request that runs while the weights change
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}


# Requests that come while the server is paused, in each way that starts requests of the engine.
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Sort: 3 1 2", "max_tokens": 8, "seed": 1}
QUESTION = {"type": "predicate", "instructions": "Ann has more than Bob"}
ARRIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", TEXT),
    "several": ("/v1/completions", TEXT | {"n": 3, "temperature": 1.0}),
    "infilling": ("/v1/completions", TEXT | {"suffix": " and go"}),
    "stream": ("/v1/completions", TEXT | {"stream": True}),
    "canvases": (
        "/v1/completions",
        TEXT | {"stream": True, "vllm_xargs": {"diffusion_stream": "canvas"}},
    ),
    "decisions": (
        "/v1/decisions",
        {"model": MODEL, "input": "Ann has 34, Bob has 51.", "questions": [QUESTION]},
    ),
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-dllm with each weight a little different."""
    generator = torch.Generator().manual_seed(0)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = (weight.float() * (1 + 0.15 * noise)).to(weight.dtype)

    return edited(TINY_DLLM, tmp_path_factory.mktemp("other") / "model", change)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serving(TINY_DLLM, tmp_path_factory, FLAGS, DEVELOPMENT)


def answers(server: Server) -> list[str]:
    create: Any = server.client().chat.completions.create
    asked = zip(CHATS, SAMPLING, strict=True)
    found = [create(model=MODEL, messages=chat, **sampling) for chat, sampling in asked]
    return [one.choices[0].message.content for one in found]


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
def fresh(other: Path) -> list[str]:
    """What an engine says that was started with the other weights."""
    engine = get_engine(other)
    encode = engine.llm.get_tokenizer().apply_chat_template
    prompts = [encode(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    found = engine.outputs(prompts, [SamplingParams(**sampling) for sampling in SAMPLING])
    return [one.outputs[0].text for one in found]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_weights_change_under_load(
    server: Server, other: Path, fresh: list[str], mode: str
) -> None:
    """``abort`` tells those that are running, ``wait`` lets them finish, ``keep`` holds them.

    Those that come later wait for the new weights, or are told to come again.
    """
    refuses = mode != "keep" and not vllm_names.is_0_32()
    load(server, TINY_DLLM)
    post(server, "/reset_prefix_cache")
    before = answers(server)
    assert before != fresh
    streams = [started(server, seed) for seed in range(4)]
    with ThreadPoolExecutor(4 + len(ARRIVALS)) as pool:
        running = [pool.submit(end, stream) for stream in streams]
        post(server, f"/pause?mode={mode}")
        late = {name: pool.submit(server.post, *asked) for name, asked in ARRIVALS.items()}
        if refuses:
            wait(late.values())
        load(server, other)
        # Those that were held go on from their text, read with the new weights.
        held = "true" if mode == "keep" else "false"
        done = post(server, f"/reset_prefix_cache?reset_running_requests={held}")
        assert done == {"success": True}
        post(server, "/resume")
        ends = [each.result() for each in running]
        told = {name: status_of(each.result()) for name, each in late.items()}
    assert told == dict.fromkeys(ARRIVALS, 503 if refuses else 200)
    expected = "abort" if mode == "abort" else "length"
    assert ends[-1][0] == expected
    # The first one may have ended before.
    assert {reason for reason, _ in ends} <= {"length", expected}
    assert {count for reason, count in ends if reason == "length"} <= {MAX_TOKENS}
    assert answers(server) == fresh
    load(server, TINY_DLLM)
    post(server, "/reset_prefix_cache")
    assert answers(server) == before


def status_of(reply: Reply) -> int:
    """The HTTP status of an answer; in a stream, that of an error in it."""
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if '"error"' in line]
    if reply.status != 200 or not events:
        return reply.status
    return int(json.loads(events[0])["error"]["code"])


def started(server: Server, seed: int) -> Any:
    """A stream whose first event has come, and whose end is hundreds of passes away."""
    stream = server.client().completions.create(
        model=MODEL,
        prompt="Count the letters.",
        max_tokens=MAX_TOKENS,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        # No canvas converges: each has all of its denoise steps.
        extra_body={"ignore_eos": True, "vllm_xargs": {"diffusion_confidence": 0}},
    )
    next(stream)
    return stream


def end(stream: Any) -> tuple[str, int]:
    """How it ends, and with how many tokens."""
    *chunks, usage = stream
    return chunks[-1].choices[0].finish_reason, usage.usage.completion_tokens
