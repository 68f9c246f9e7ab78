"""Runs vLLM's engines without CUDA graphs, and with, from a tape (``tape_engine``).

    python -m tests.support.tape_worker JOBS OUTPUT

JOBS is JSON: for each engine a name, and the arguments of ``run`` or ``run_planted``. OUTPUT gets
what they return. A process of its own, with the variables of ``tape_jobs.run_jobs``.
"""

import json
import os
import sys
import traceback
from contextlib import nullcontext
from copy import deepcopy
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams, _custom_ops
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from dllm.patches.compile_check import drop_wrong_code
from dllm.patches.graph_check import drop_wrong_graphs
from tests.support import tape, tape_plants
from tests.support.attention_backend_worker import serve_with_triton_kernel
from tests.support.engine_harness import Engine
from tests.support.forced_async import asynchronous_platform
from tests.support.images import IMAGE_TOKEN, picture
from tests.support.tape_adapters import adapt_as_on_gpu
from tests.support.tape_engine import (
    capture,
    drafts_of,
    graphs_of_cuda,
    run_as_on_cuda,
    steps_of_canvases,
)
from tests.support.tape_modes import FULL

ASKED_WITH = ("batches", "num_tokens", "adapter", "weights", "code", "checks")
NUMBER = 9  # of an adapter; a start makes up 1 and 2
BEGINS_A_THOUGHT = {7: 100.0}  # the token's logit, as of tests/engine/test_thoughts.py
SAMPLED = {"temperature": 1.0}
# What a request asks for. All are seeded, and without a grammar go on behind an end of the text.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "grammar": SAMPLED
    | {"structured_outputs": StructuredOutputsParams(regex="[a-c]{12}"), "ignore_eos": False},
    "pins": SAMPLED
    | {
        "extra_args": {
            "diffusion_pin_at": [0, 5],
            "diffusion_pin_ids": [40, 41],
            "diffusion_pin_mode": "hold",
        }
    },
    "thoughts": SAMPLED | {"thinking_token_budget": 3, "logit_bias": BEGINS_A_THOUGHT},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "decision": {
        "temperature": 0.0,
        "max_tokens": 2,
        "logprob_token_ids": [30, 31],
        "extra_args": {"diffusion_max_steps": 1},
    },
    "adapter": {"temperature": 0.0},
    "image": {"temperature": 0.0},
}


def run(mode: str = FULL, **job: Any) -> dict[str, Any]:
    """Answers with graphs and without, and what was replayed (``_start``, ``_compare``)."""
    asked = {name: job.pop(name) for name in ASKED_WITH if name in job}
    return _compare(_start(mode=mode, **job), **asked)


def run_planted(plants: list[str], **job: Any) -> dict[str, Any]:
    """As ``run``, with each fault of ``tape_plants`` in a process of its own; ``left``: the modes
    of graphs that a start has not found wrong."""
    asked = {name: job.pop(name) for name in ASKED_WITH if name in job}
    engine, results = _start(mode=FULL, **job), {}
    with TemporaryDirectory() as folder:
        for name in plants:
            path = f"{folder}/{name}"
            if (child := os.fork()) == 0:
                try:
                    getattr(tape_plants, name)(engine)
                    torch.save(_compare(engine, checks=True, **asked), path)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            results[name] = torch.load(path)
    return results


def _start(
    model: str, sizes: list[int], mode: str, is_async: bool = True, **options: Any
) -> Engine:
    """An engine whose graphs are not captured yet.

    Args:
        sizes: numbers of tokens with graphs.
        options: of the engine.
    """
    given: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "block_size": 32,
        "attention_config": {"backend": "CUSTOM"},
        "async_scheduling": is_async,
        "enforce_eager": mode == FULL,
        "kv_cache_memory_bytes": 16 << 20,
    }
    if options.get("enable_lora"):
        adapt_as_on_gpu()
    platform = asynchronous_platform() if is_async else nullcontext()
    with platform, graphs_of_cuda(mode, sizes):
        engine = Engine(model, **given | options)
    run_as_on_cuda(engine.runner)
    return engine


def _compare(
    engine: Engine,
    batches: list[list[str]],
    num_tokens: int = 40,
    adapter: str | None = None,
    weights: list[str] | None = None,
    code: str | None = None,
    checks: bool = False,
) -> dict[str, Any]:
    """
    Args:
        batches: the kinds of requests that are asked at once.
        adapter: of requests of that kind.
        weights: checkpoints whose weights come one after the other while graphs serve.
        code: "right", or "wrong" from here on: what vLLM compiles, which is compared as at a start.
        checks: whether graphs are compared as at a start, in the end.
    """
    runner, worker = engine.runner, engine.core.model_executor.driver_worker.worker

    def answers() -> list[Any]:
        found = [_answers(engine, kinds, num_tokens, adapter) for kinds in batches]
        for path in weights or []:
            worker.reload_weights(weights_path=path)
            found.append(_answers(engine, batches[0], num_tokens, adapter))
        return found

    result: dict[str, Any] = {"eager": answers(), "failed": ""}
    if code == "wrong":
        tape_plants.wrong_code(engine)
    if code is not None:
        drop_wrong_code(runner)
    try:
        result["replayed"] = capture(runner)
    except tape.CaptureError as error:
        return result | {"failed": str(error)}
    if runner.speculator is None:
        result["steps"] = steps_of_canvases(runner)
    result |= {"taped": answers(), "faults": dict(tape.FAULTS)}
    if checks:
        result = deepcopy(result)  # of the answers alone
        drop_wrong_graphs(runner)
        graphs = chain(*runner.cudagraph_manager._candidates.values())
        result["left"] = {graph.cg_mode.name for graph in graphs}
    return result


def _answers(engine: Engine, kinds: list[str], num_tokens: int, adapter: str | None) -> Any:
    """Of each request its tokens, and log-probabilities; and logits of all passes of canvases.

    With a drafter also the drafts of all steps: they change no token, as each is verified.
    """
    prompts = [_prompt(n, with_image=kind == "image") for n, kind in enumerate(kinds)]
    common: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    params = [SamplingParams(**common | {"seed": n} | KINDS[kind]) for n, kind in enumerate(kinds)]
    adapters = [
        LoRARequest("adapter", NUMBER, adapter) if kind == "adapter" and adapter else None
        for kind in kinds
    ]
    engine.reset_prefix_cache()
    asked: dict[str, Any] = {"lora_request": adapters, "use_tqdm": False}
    if engine.runner.speculator is not None:
        with drafts_of(engine.runner.speculator) as drafts:
            outputs = engine.llm.generate(prompts, params, **asked)
        found = [(list(one.outputs[0].token_ids), _scores(one)) for one in outputs]
        return [*found, (drafts, [])]
    with engine.watch(keep_logits=True) as watched:
        outputs = engine.llm.generate(prompts, params, **asked)
    return [
        (
            list(one.outputs[0].token_ids),
            _scores(one),
            torch.cat([step.logits for step in watched[one.request_id]]),
        )
        for one in outputs
    ]


def _prompt(n: int, with_image: bool) -> dict[str, Any]:
    """Another one for each ``n``."""
    ids = [20 + (7 + n) * i % 380 for i in range(5 + 16 * n)]
    if not with_image:
        return {"prompt_token_ids": ids}
    pictures = {"image": [picture(n)]}
    return {"prompt_token_ids": [*ids, IMAGE_TOKEN, *ids], "multi_modal_data": pictures}


def _scores(output: Any) -> list[float]:
    """The log-probabilities of prompt and answer, those of a place by their tokens' ids."""
    places = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [place[token].logprob for place in places if place for token in sorted(place)]


if __name__ == "__main__":
    serve_with_triton_kernel()
    jobs = json.loads(sys.argv[1])
    if any("weights" in job for job in jobs.values()):
        # Its layers read packed copies of their weights, those of a GPU the weights themselves.
        _custom_ops._supports_onednn = False
    results = {}
    for name, job in jobs.items():
        try:
            results[name] = (run_planted if "plants" in job else run)(**job)
        except Exception:  # of this job alone
            results[name] = {"failed": traceback.format_exc()}
    torch.save(results, sys.argv[2])
