"""vLLM's launchers without an API server: a file of requests, and a server that only renders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S
from tests.support.server_harness import CHECKPOINTS, COMMON_FLAGS, ENVIRONMENT, MODEL, Server

VLLM = Path(sys.executable).parent / "vllm"
MESSAGES = [{"role": "user", "content": "What is 3 + 5?"}]
PINS = [{"at": 0, "text": "7"}]
EXTRA = {"diffusion_trace": True, "diffusion_pin_mode": "hold"}

pytestmark = pytest.mark.slow


def test_a_file_of_requests_is_answered_and_refused_as_over_http(tmp_path):
    asked = {
        "pinned": {"diffusion_pins": PINS, "vllm_xargs": EXTRA},
        "refused": {"vllm_xargs": {"nonsense": 1}},
    }
    given, answers = tmp_path / "given.jsonl", tmp_path / "answers.jsonl"
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "seed": 1}
    with given.open("w") as file:
        for name, options in asked.items():
            request = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            print(json.dumps(request | {"body": common | options}), file=file)
    command = [VLLM, "run-batch", "-i", given, "-o", answers, "--model", CHECKPOINTS / "tiny-dllm"]
    environment = os.environ | ENVIRONMENT
    subprocess.run([*command, *COMMON_FLAGS], check=True, env=environment, timeout=HANG_S)
    found = {line["custom_id"]: line for line in map(json.loads, answers.open())}
    (choice,) = found["pinned"]["response"]["body"]["choices"]
    assert choice["message"]["content"].startswith("7") and choice["diffusion_trace"]
    assert found["refused"]["error"]["error"]["param"] == "nonsense"


def test_a_server_that_renders_refuses_what_only_chats_serve(tmp_path):
    command = [str(VLLM), "launch", "render"]
    flags = (f"--served-model-name={MODEL}", "--reasoning-parser=gemma4")
    with Server(CHECKPOINTS / "tiny-tools", tmp_path / "log", flags, command=command) as server:
        server.wait_until_ready()
        asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
        reply = server.post("/v1/chat/completions/render", asked | {"diffusion_pins": PINS})
        assert (reply.status, reply.parameter) == (400, "diffusion_pins")
        reply = server.post("/v1/messages/render", asked | {"n": 2})
        assert (reply.status, reply.parameter) == (400, "n")
        plain, thinking = (
            server.ask("/v1/messages/render", asked | {"thinking": {"type": kind}})["token_ids"]
            for kind in ("disabled", "adaptive")
        )
        assert plain != thinking
