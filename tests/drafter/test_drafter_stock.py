"""Our drafter drafts what vLLM's own does; with DLLM_DISABLE=1 vLLM's own is what runs.

The checkpoint is one that a calibration exports, which stock vLLM has to load, too.

On a CPU vLLM 0.32 normalizes the context's keys of every layer with the first layer's weight
(its CPU ``rms_norm`` takes one row of weights), so the drafter here has one weight for all layers.
With weights of their own ours follows the definition: ``test_drafter_engine.py``.

vLLM's runs in a process of its own, which is this file as a script.
"""

import json
import sys
from pathlib import Path

import pytest

from dllm.train.export import write_checkpoint
from tests.support.drafter_harness import LIMITS, drafting_engine, greedy, prompt, watch_drafts
from tests.support.drafter_pairs import drafter_config, random_drafter, write_target
from tests.support.engine_harness import KV_CACHE_BYTES
from tests.support.process import QUIET_ENGINE, printed_json, run_python
from tests.support.recorded_calls import record_calls

NUM_DRAFTS = 5
PROMPT = prompt(40, 1)
NUM_TOKENS = 12


def stock_drafts(target: Path, drafter: Path) -> dict:
    """What vLLM's own drafter drafts behind ``PROMPT``, in a process without ours."""
    environment = QUIET_ENGINE | {"DLLM_DISABLE": "1"}
    finished = run_python("-m", __name__, str(target), str(drafter), environment=environment)
    theirs = printed_json(finished)
    assert theirs["proposer"] == "vllm.v1.spec_decode.dflash.DFlashProposer"
    return theirs


def test_drafts_are_those_of_vllms_own_drafter(tmp_path):
    weights = random_drafter()
    weights["layers.1.self_attn.k_norm.weight"] = weights[
        "layers.0.self_attn.k_norm.weight"
    ].clone()
    target = write_target(tmp_path / "target")
    drafter = tmp_path / "drafter"
    write_checkpoint(drafter, drafter_config(), weights)
    theirs = stock_drafts(target, drafter)

    engine = drafting_engine(target, drafter, NUM_DRAFTS)
    with watch_drafts(engine) as seen:
        tokens = engine.generate([PROMPT], greedy(NUM_TOKENS))[0]
    assert tokens == theirs["tokens"]
    assert len(seen) >= NUM_TOKENS / (NUM_DRAFTS + 1)
    # vLLM's drafts behind the last step, too, in which the request ends.
    assert [draft.drafts for draft in seen] == theirs["drafts"][:-1]
    assert len({tuple(draft.drafts) for draft in seen}) > len(seen) / 2  # not one draft again


def main(target: str, drafter: str) -> None:
    """Print, as JSON, what vLLM's own drafter drafts in this process."""
    from vllm import LLM

    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": NUM_DRAFTS}
    options = {"dtype": "float32", "enforce_eager": True} | LIMITS
    options |= {"kv_cache_memory_bytes": KV_CACHE_BYTES}
    llm = LLM(target, speculative_config=speculative, **options)
    core = llm.llm_engine.engine_core.engine_core
    proposer = type(core.model_executor.driver_worker.worker.model_runner.drafter)
    proposed = record_calls(pytest.MonkeyPatch(), proposer, "propose")
    output = llm.generate([{"prompt_token_ids": PROMPT}], greedy(NUM_TOKENS), use_tqdm=False)
    result = {
        "proposer": f"{proposer.__module__}.{proposer.__qualname__}",
        "tokens": list(output[0].outputs[0].token_ids),
        "drafts": [of_row for _, drafts in proposed for of_row in drafts.tolist()],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
