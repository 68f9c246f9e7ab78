"""``DLLM_DISABLE=1``: vLLM's own DiffusionGemma answers, on our CPU runtime.

In a process of its own, because this one serves the architecture with ours.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm

from dllm.patches.cpu import is_cpu_without_triton
from tests.support.process import QUIET_ENGINE, printed_json, run_python

pytestmark = pytest.mark.slow

NUM_TOKENS = 40  # no multiple of the canvas of 32

# Serves one request and prints what served it.
SCRIPT = """
import json, sys, torch
from vllm import LLM, SamplingParams, plugins
from vllm.exceptions import VLLMValidationError

llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=2)
core = llm.llm_engine.engine_core.engine_core
worker = core.model_executor.driver_worker.worker
worker._should_warm_up_model = lambda: True  # as in a compiled start
worker.compile_or_warm_up_model()
params = SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": list(range(20, 50))}], params)
try:
    llm.generate(["x"], SamplingParams(temperature=0.5, max_tokens=1))
    refusal = ""
except VLLMValidationError as error:
    refusal = str(error)

def name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"

runner = worker.model_runner
parameters = [key for key, _ in runner.model.named_parameters()]
runner.model.lm_head = None
of_no_rows = runner.model.compute_logits(torch.empty(0, 8))
print(json.dumps({
    "num_tokens": len(output.outputs[0].token_ids),
    "refusal": refusal,
    "model": [name(cls) for cls in type(runner.model).__mro__[:2]],
    "own_attributes": [key for key in vars(type(runner.model)) if not key.startswith("__")],
    "others": [name(type(it)) for it in (runner.model_state, runner.sampler, core.scheduler)],
    "routes": [type(it).__name__ for it in plugins.load_endpoint_plugins(("generate",))],
    "parameters": parameters,
    "no_rows": len(of_no_rows),
    "modules": [key for key in sys.modules if key.startswith("dllm")],
    "files": [str(getattr(it, "__file__", None)) for key, it in sys.modules.items()
              if key == "vllm.model_executor.models.gemma4_mm"],
}))
"""


@pytest.fixture(scope="module")
def served(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """What served a request under ``DLLM_DISABLE=1``."""
    if not is_cpu_without_triton():
        pytest.skip("elsewhere vLLM serves the built-in class without help")
    environment = QUIET_ENGINE | {"DLLM_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # The checkpoint carries a vision tower, which has to be skipped.
    process = run_python("-c", SCRIPT, str(checkpoint()), str(NUM_TOKENS), environment=environment)
    report: dict[str, Any] = printed_json(process)
    return report


BUILTIN = "vllm.model_executor.models.diffusion_gemma"
IMAGE_PROCESSING = "model_executor/models/gemma4_mm.py"


def test_the_builtin_class_serves(served: dict[str, Any]) -> None:
    assert served["model"] == [
        "dllm.patches.builtin.TextOnlyDiffusionGemma",
        f"{BUILTIN}.DiffusionGemmaForConditionalGeneration",
    ]
    assert served["num_tokens"] == NUM_TOKENS
    assert not [name for name in served["parameters"] if "vision" in name]


def test_what_a_denoise_step_runs_is_not_overridden(served: dict[str, Any]) -> None:
    allowed = {"supports_multimodal", "supports_multimodal_embeddings", "hf_to_vllm_mapper"}
    allowed |= {"compute_logits"}  # of no rows
    assert set(served["own_attributes"]) - allowed <= {"_is_protocol", "_abc_impl"}
    assert served["others"] == [
        f"{BUILTIN}.DiffusionGemmaModelState",
        f"{BUILTIN}.DiffusionSampler",
        "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler",
    ]


def test_ours_is_not_loaded(served: dict[str, Any]) -> None:
    assert served["routes"] == []  # where ours take over vLLM's /v1/systemone, and add routes
    ours = {
        "dllm.models.gemma.backbone",
        "dllm.engine.model_state",
        "dllm.engine.sampler",
        "dllm.engine.scheduler",
        "dllm.settings.request",
    }
    assert not ours & set(served["modules"])
    assert "not yet supported with diffusion models" in served["refusal"]


def test_of_no_rows_nothing_is_multiplied(served: dict[str, Any]) -> None:
    """With AMX vLLM's product of no rows divides by their number, and kills the process."""
    assert served["no_rows"] == 0


def test_the_stand_in_does_not_outlive_the_import(served: dict[str, Any]) -> None:
    """Under its name stands vLLM's module, where that can be imported, and otherwise nothing."""
    assert served["files"] in ([], [str(Path(vllm.__file__).parent / IMAGE_PROCESSING)])
