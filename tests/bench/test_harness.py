"""lm-evaluation-harness itself asks a server of the bundled model with masks, over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_harness import Server

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-sdar"
# DLLM_LM_EVAL: another folder that holds the package.
HARNESS = Path(os.environ.get("DLLM_LM_EVAL", Path(sys.prefix) / "lm_eval"))
FLAGS = ("--enforce-eager", "--max-model-len=512", "--max-num-seqs=16", "--served-model-name=it")
FAMILIES = 11

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HARNESS.exists(), reason="lm_eval is not installed: make lm_eval"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(CHECKPOINT, tmp_path_factory.mktemp("server") / "log", FLAGS) as running:
        running.wait_until_ready()
        yield running


def evaluate(
    server: Server, module: str, model: str, route: str, task: str, count: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command of docs/clients.md; ``count`` questions of each family."""
    model_args = f"model=it,base_url={server.url}/v1/{route},tokenizer={CHECKPOINT}"
    command = [sys.executable, "-m", module, "run", "--model", model, "--apply_chat_template"]
    command += ["--model_args", f"{model_args},num_concurrent=8,max_retries=1"]
    command += ["--include_path", "bench/harness", "--tasks", task, "--output_path", str(folder)]
    command += ["--metadata", json.dumps({"count": count})]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HARNESS}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


def figures(ran: subprocess.CompletedProcess[str], folder: Path, task: str) -> dict[str, float]:
    assert ran.returncode == 0, ran.stderr[-3000:]
    (written,) = folder.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["n-samples"][task]["effective"] >= FAMILIES
    return dict(found["results"][task])


def test_free_answers_are_right(server, tmp_path):
    asked = ("lm_eval", "local-chat-completions", "chat/completions", "dllm_answers")
    ran = evaluate(server, *asked, 5, tmp_path)
    assert figures(ran, tmp_path, "dllm_answers")["exact_match,none"] > 0.8


def test_the_right_of_four_answers_is_the_likeliest_by_scores(server, tmp_path):
    asked = ("bench.harness", "dllm-scores", "completions", "dllm_choices")
    ran = evaluate(server, *asked, 3, tmp_path)
    assert figures(ran, tmp_path, "dllm_choices")["acc,none"] > 0.8


def test_echoed_logprobs_are_refused_with_a_reason(server, tmp_path):
    asked = ("lm_eval", "local-completions", "completions", "dllm_choices")
    ran = evaluate(server, *asked, 1, tmp_path)
    assert ran.returncode != 0
    assert "Status code: 400" in ran.stderr and "prompt_logprobs" in ran.stderr
