"""Starts an engine with torch.compile, runs requests of every kind, and counts compilations.

    python compiled_start_worker.py CHECKPOINT

It prints one JSON object: whether the backbone was compiled or loaded, how many functions were
traced before the engine was ready, which of them more than once, how many guards a call of each
checks, how many more were traced for each kind of request, and the tokens.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter

from dllm.engine import compilation

CANVAS = 32
KINDS: dict[str, tuple[int, int, dict[str, object]]] = {  # requests, prompt tokens, parameters
    "plain": (1, 20, {}),
    "two": (2, 20, {}),
    "three": (3, 20, {}),
    "a prompt of one token": (1, 1, {}),
    "a prompt in chunks": (1, 150, {}),
    "to the model's end": (1, 254, {}),
    "a canvas of one token": (1, 20, {"extra_args": {"diffusion_canvas_length": 1}}),
    "a canvas of two": (1, 20, {"extra_args": {"diffusion_canvas_length": 2}}),
    "two canvases of one": (2, 20, {"extra_args": {"diffusion_canvas_length": 1}}),
    "greedy": (1, 20, {"temperature": 0}),
    "top_k": (1, 20, {"top_k": 3}),
    "top_p": (2, 20, {"top_p": 0.5}),
    "min_p": (3, 20, {"min_p": 0.1}),
    "a filtered canvas": (1, 20, {"top_k": 3, "extra_args": {"diffusion_canvas_length": 1}}),
    "logprobs": (1, 20, {"logprobs": 2}),
    "n": (1, 20, {"n": 2}),
}


def num_traced() -> int:
    """How many functions torch.compile has traced in this process."""
    return int(counters["frames"]["total"])


def main() -> None:
    checked: list[int] = []
    guards_to_check = compilation._guards_to_check

    def counted(guards: Sequence[Any]) -> list[bool]:
        are_checked = guards_to_check(guards)
        checked.append(sum(are_checked))
        return are_checked

    compilation._guards_to_check = counted
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        disable_log_stats=True,
        kv_cache_memory_bytes=64 << 20,
    )
    report: dict[str, object] = {
        "compiled": compilation_counter.num_aot_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "traced": num_traced(),
        "checked": checked,
        "traced_again": [
            f"{entry.co_name}: {entry.recompile_reason}"
            for entry in get_compilation_metrics()
            if entry.recompile_reason
        ],
    }
    traced, tokens = {}, {}
    for kind, (num_requests, prompt_len, given) in KINDS.items():
        before = num_traced()
        prompt = {"prompt_token_ids": [5 + i % 400 for i in range(prompt_len)]}
        params = SamplingParams(max_tokens=2 * CANVAS, seed=1, **given)
        outputs = llm.generate([prompt] * num_requests, params, use_tqdm=False)
        tokens[kind] = [list(output.outputs[0].token_ids) for output in outputs]
        traced[kind] = num_traced() - before
    print(json.dumps(report | {"traced_later": traced, "tokens": tokens}))


main()
