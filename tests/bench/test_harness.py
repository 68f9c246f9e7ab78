"""lm-evaluation-harness itself asks a server of the bundled model with masks, over HTTP."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.chat_stub import Stub, serve
from tests.support.process import run_python
from tests.support.server_harness import CHECKPOINTS, MODEL, Server

pytest_plugins = ["tests.support.sdar_server"]

ROOT = CHECKPOINTS.parent
# DLLM_LM_EVAL: another folder that holds the package.
HARNESS = Path(os.environ.get("DLLM_LM_EVAL", Path(sys.prefix) / "lm_eval"))
FAMILIES = 11

pytestmark = pytest.mark.skipif(
    not HARNESS.exists(), reason="lm_eval is not installed: make lm_eval"
)


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


# --- the recipe for GSM8K, GPQA and AIME ----------------------------------------------------------

# Folder of the task in lm_eval, its file, the metric to read, and two made questions of its form.
TASKS: dict[str, tuple[str, str, str, list[dict[str, str]]]] = {
    "gsm8k_cot_zeroshot": (
        "gsm8k",
        "gsm8k-cot-zeroshot.yaml",
        "exact_match,flexible-extract",
        [
            {"question": "Lou has 3 bags of 4 pears. How many pears?", "answer": "3*4=12\n#### 12"},
            {"question": "Bo has 2 bags of 4 pears. How many pears?", "answer": "2*4=8\n#### 8"},
        ],
    ),
    "gpqa_diamond_cot_zeroshot": (
        "gpqa/cot_zeroshot",
        "gpqa_diamond_cot_zeroshot.yaml",
        "exact_match,flexible-extract",
        [
            {"Question": f"Which is {name}?", "Correct Answer": right}
            | {f"Incorrect Answer {n}": f"none of {n}" for n in (1, 2, 3)}
            for name, right in (("the first", "twelve"), ("the second", "eight"))
        ],
    ),
    "aime25": (
        "aime",
        "aime25.yaml",
        "exact_match,none",
        [
            {"problem": "Find the remainder of 112 divided by 100.", "answer": "12"},
            {"problem": "Find the remainder of 108 divided by 100.", "answer": "8"},
        ],
    ),
}
RECIPE = '{"until": [], "max_gen_toks": 32768, "chat_template_kwargs": {"enable_thinking": true}}'


def with_made_questions(task: str, folder: Path) -> None:
    """lm_eval's own task, which asks its prompts and reads its answers, with our two questions."""
    under, file, _, questions = TASKS[task]
    there = shutil.copytree(HARNESS / "lm_eval/tasks" / under, folder / task)
    for other in there.glob("*.yaml"):
        if other.name != file:
            other.unlink()
    (there / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    files = json.dumps(dict.fromkeys(("train", "test"), str(there / "made.jsonl")))
    for path in (*there.glob("*.yaml"), *there.glob("_*_yaml")):
        text = re.sub(r"(?m)^dataset_name: .*\n", "", path.read_text())
        local = f"dataset_path: json\ndataset_kwargs: {{data_files: {files}}}"
        path.write_text(re.sub(r"(?m)^dataset_path: .*$", local, text))


def run_recipe(url: str, model: str, folder: Path, gen_kwargs: str) -> Mapping[str, dict]:
    """The command of docs/clients.md, on made questions; the results of each task."""
    for task in TASKS:
        with_made_questions(task, folder / "tasks")
    model_args = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=2,timeout=3600"
    command = ["-m", "lm_eval", "run", "--model", "local-chat-completions"]
    command += ["--apply_chat_template", "--model_args", model_args, "--gen_kwargs", gen_kwargs]
    command += ["--include_path", str(folder / "tasks"), "--tasks", ",".join(TASKS)]
    environment = {"PYTHONPATH": f"{ROOT}:{HARNESS}", "HF_HUB_OFFLINE": "1"}
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")
    ran = run_python(*command, "--output_path", str(folder / "out"), environment=environment)
    assert "|n-shot|" in ran.stdout  # a table with heads
    (written,) = (folder / "out").rglob("results_*.json")
    found = json.loads(written.read_text())
    assert {name: n["effective"] for name, n in found["n-samples"].items()} == dict.fromkeys(
        TASKS, 2
    )
    return dict(found["results"])


def answer(messages: list[dict[str, str]]) -> str:
    """Twelve, to every question, as each task wants it: right for the first of its two."""
    asked = messages[-1]["content"]
    if choice := re.search(r"\((.)\) twelve", asked):
        return f"Question: is it twelve? The answer is ({choice[1]})."
    if "Choices:" in asked:
        return "The answer is none of them."
    return "It is \\boxed{12}." if asked.endswith("\nAnswer:") else "3 * 4 = 12. The answer is 12."


def test_the_recipe_asks_with_thoughts_and_scores_the_answers(tmp_path):
    with serve(Stub(answer, models=("m",))) as stub:
        results = run_recipe(stub.url, "m", tmp_path, RECIPE)
    for task, (*_, metric, _) in TASKS.items():
        assert results[task][metric] == 0.5, task
    assert len(stub.requests) == 6
    for body in stub.requests:
        assert body["chat_template_kwargs"] == {"enable_thinking": True}
        assert (body["stop"], body["max_tokens"], body["temperature"]) == ([], 32768, 0)
    assert RECIPE in (ROOT / "docs/clients.md").read_text()


def test_a_server_takes_the_requests_of_the_recipe(sdar_server, tmp_path):
    results = run_recipe(sdar_server.url, MODEL, tmp_path, RECIPE.replace("32768", "64"))
    assert all(0 <= results[task][metric] <= 1 for task, (*_, metric, _) in TASKS.items())
