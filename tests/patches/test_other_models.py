"""A model that is not ours behaves with the plugin as without it, and can opt into our CPU runtime.

Each configuration runs in a process of its own, which is this file as a script: what the plugin
patches cannot be taken back.
"""

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.process import QUIET_ENGINE, printed_json, run_python

pytestmark = pytest.mark.slow

TOKENIZER = Path(__file__).parents[2] / "checkpoints/tiny-random"
CPU_WORKER = "dllm.patches.cpu_worker.CanvasCPUWorker"
TIMEOUT_S = 120

CONTEXTS = [
    [20 + (7 * i + salt) % 450 for i in range(length)] for salt, length in enumerate((3, 40, 90))
]
# Parameters whose outcome leaves no room for chance; the second column shows that they did
# something: their tokens are not the plain ones.
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 1.0, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "presence and frequency": GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": GREEDY | {"repetition_penalty": 1.8},
    "logit bias": GREEDY | {"logit_bias": {100: 100.0}},
    "allowed ids": GREEDY | {"allowed_token_ids": [30, 40, 50]},
    "logprobs": GREEDY | {"logprobs": 3, "prompt_logprobs": 2},
    "one candidate": SAMPLED | {"top_k": 1},
    "tiny nucleus": SAMPLED | {"top_p": 1e-6},
    "certain": SAMPLED | {"min_p": 1.0},
}
PLAIN = ("greedy", "logprobs", "one candidate", "tiny nucleus", "certain")
# Drawn at random: each engine has its own noise, but a seed fixes it.
DRAWN = {"seed 5": SAMPLED, "seed 5 again": SAMPLED, "seed 6": SAMPLED | {"seed": 6}}


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, in fp32, with our tokenizer."""
    path = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        initializer_range=0.5,  # decided: no two candidates within rounding of each other
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, path)
    return path


@pytest.fixture(scope="module")
def outcome(qwen3: Path, checkpoint: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    """What Qwen3 answers in a process that is set up in one of the three ways."""

    @functools.cache
    def run(setup: str) -> dict[str, Any]:
        plugins = "" if setup == "no plugin" else None
        environment = QUIET_ENGINE | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": plugins}
        arguments = (setup, str(qwen3), str(checkpoint()))
        return printed_json(run_python("-m", __name__, *arguments, environment=environment))

    return run


def test_without_the_plugin_nothing_of_ours_is_loaded(outcome):
    assert outcome("no plugin")["loaded"] == []
    assert "dllm.patches.install" in outcome("beside ours")["loaded"]


def test_a_model_served_beside_ours_behaves_as_without_the_plugin(outcome):
    """Same process: ours has answered a request before, and its patches are all in place."""
    beside, alone = outcome("beside ours"), outcome("no plugin")
    assert beside["runner"] == alone["runner"]
    assert beside["scheduler"] == alone["scheduler"]
    assert beside["tokens"] == alone["tokens"]
    assert beside["logprobs"] == alone["logprobs"]


def test_the_cases_are_what_they_say(outcome):
    """Otherwise the comparisons above and below would be of nine greedy runs."""
    tokens = outcome("no plugin")["tokens"]
    greedy = tokens["greedy"]
    assert {name for name in CASES if tokens[name] == greedy} == set(PLAIN)
    assert len({tuple(row) for row in greedy}) == len(CONTEXTS)
    assert all(len(set(row)) > 2 for row in greedy)


@pytest.mark.parametrize("case", CASES)
def test_the_cpu_runtime_gives_the_tokens_of_vllms_own_runner(outcome, case):
    """Model Runner V2 without Triton, opted into with `worker_cls`."""
    ours, vllms = outcome("cpu runtime"), outcome("no plugin")
    assert ours["runner"] != vllms["runner"]
    assert ours["tokens"][case] == vllms["tokens"][case]


def test_the_cpu_runtime_gives_the_logprobs_of_vllms_own_runner(outcome):
    ours, vllms = outcome("cpu runtime")["logprobs"], outcome("no plugin")["logprobs"]
    for kind in ("prompt", "output"):
        assert [[sorted(place) for place in row] for row in ours[kind]] == [
            [sorted(place) for place in row] for row in vllms[kind]
        ]
        for our_row, their_row in zip(ours[kind], vllms[kind], strict=True):
            for our_place, their_place in zip(our_row, their_row, strict=True):
                assert our_place == pytest.approx(their_place, abs=1e-4)


def test_the_cpu_runtime_samples_by_seed(outcome):
    tokens = outcome("cpu runtime")["tokens"]
    assert tokens["seed 5"] == tokens["seed 5 again"]
    assert tokens["seed 5"] != tokens["seed 6"]
    assert tokens["seed 5"] != tokens["greedy"]


# --- the process ---------------------------------------------------------------------------------


def main(setup: str, qwen3: str, diffusion: str) -> None:
    """Print, as JSON, what Qwen3 answers in this process."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
    }
    if setup == "beside ours":
        ours = LLM(diffusion, **options)
        ours.generate(
            {"prompt_token_ids": CONTEXTS[0]}, SamplingParams(max_tokens=4), use_tqdm=False
        )
    if setup == "cpu runtime":
        options["worker_cls"] = CPU_WORKER
    llm = LLM(qwen3, **options)
    core = llm.llm_engine.engine_core.engine_core
    prompts = [{"prompt_token_ids": context} for context in CONTEXTS]
    tokens, logprobs = {}, {}
    for name, case in (CASES | DRAWN).items():
        outputs = llm.generate(prompts, SamplingParams(**case), use_tqdm=False)
        tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
        if name == "logprobs":
            logprobs["prompt"] = [readable(output.prompt_logprobs[1:]) for output in outputs]
            logprobs["output"] = [readable(output.outputs[0].logprobs) for output in outputs]
    result = {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "scheduler": type(core.scheduler).__qualname__,
        "loaded": sorted(name for name in sys.modules if name.startswith("dllm")),
        "tokens": tokens,
        "logprobs": logprobs,
    }
    print(json.dumps(result))


def readable(logprobs: Any) -> list[dict[str, float]]:
    return [{str(token): entry.logprob for token, entry in place.items()} for place in logprobs]


if __name__ == "__main__":
    main(*sys.argv[1:])
