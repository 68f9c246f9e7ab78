"""lm-evaluation-harness itself asks a server of the bundled model with masks, over HTTP."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.process import run_python
from tests.support.server_harness import CHECKPOINTS, MODEL, Server

pytest_plugins = ["tests.support.sdar_server"]

ROOT = CHECKPOINTS.parent
# DLLM_LM_EVAL: another folder that holds the package.
HARNESS = Path(os.environ.get("DLLM_LM_EVAL", Path(sys.prefix) / "lm_eval"))
FAMILIES = 11

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HARNESS.exists(), reason="lm_eval is not installed: make lm_eval"),
]


def evaluate(
    server: Server, asked: tuple[str, str, str, str], count: int, folder: Path, status: int = 0
) -> str:
    """Run the command of docs/clients.md; what it says.

    Args:
        asked: module, model, route, task.
        count: questions of each family.
        status: the exit status that is expected.
    """
    module, model, route, task = asked
    tokenizer = CHECKPOINTS / "tiny-sdar"
    model_args = f"model={MODEL},base_url={server.url}/v1/{route},tokenizer={tokenizer}"
    command = ["-m", module, "run", "--model", model, "--apply_chat_template"]
    command += ["--model_args", f"{model_args},num_concurrent=8,max_retries=1"]
    command += ["--include_path", "bench/harness", "--tasks", task, "--output_path", str(folder)]
    command += ["--metadata", json.dumps({"count": count})]
    environment = {"PYTHONPATH": f"{ROOT}:{HARNESS}", "HF_HUB_OFFLINE": "1"}
    return run_python(*command, environment=environment, status=status).stderr


def figures(folder: Path, task: str) -> dict[str, float]:
    (written,) = folder.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["n-samples"][task]["effective"] >= FAMILIES
    return dict(found["results"][task])


def test_free_answers_are_right(sdar_server, tmp_path):
    asked = ("lm_eval", "local-chat-completions", "chat/completions", "dllm_answers")
    evaluate(sdar_server, asked, 5, tmp_path)
    assert figures(tmp_path, "dllm_answers")["exact_match,none"] > 0.8


def test_the_right_of_four_answers_is_the_likeliest_by_scores(sdar_server, tmp_path):
    asked = ("bench.harness", "dllm-scores", "completions", "dllm_choices")
    evaluate(sdar_server, asked, 3, tmp_path)
    assert figures(tmp_path, "dllm_choices")["acc,none"] > 0.8


def test_echoed_logprobs_are_refused_with_a_reason(sdar_server, tmp_path):
    asked = ("lm_eval", "local-completions", "completions", "dllm_choices")
    said = evaluate(sdar_server, asked, 1, tmp_path, status=1)
    assert "Status code: 400" in said and "prompt_logprobs" in said
