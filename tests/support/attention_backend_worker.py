"""Runs vLLM's engine with our CUDA attention backend, in Triton's interpreter.

    python -m tests.support.attention_backend_worker JOBS OUTPUT

JOBS is JSON: for each engine a name, and the arguments of ``run``. OUTPUT gets what it returns.

``test_backend_engines.py`` starts it as a process of its own, because ``TRITON_INTERPRET=1`` has
to be set before triton is imported. vLLM's CPU platform knows one backend only; here it returns
ours. So metadata builder, implementation and cache layout are those of a CUDA server.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from dllm.attention import backend
from dllm.attention.choice import FLASH, HOPPER, KINDS, choose_kernel
from tests.support import tape
from tests.support.engine_harness import Engine
from tests.support.forced_async import asynchronous_platform
from tests.support.interpreter import speed_up
from tests.support.tape_engine import capture, graphs_of_cuda, run_as_on_cuda
from tests.support.tape_modes import FULL

BACKEND = "dllm.attention.backend.CanvasAttentionBackend"


def serve_with_triton_kernel() -> None:
    """Make vLLM's CPU platform choose our backend, and the interpreter faster."""
    speed_up()
    # The plugin registers it only on platforms other than a CPU.
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: BACKEND)


def run(flash: bool = False, **job: Any) -> dict[str, Any]:
    """``run_requests``. With ``flash`` kernels are chosen as on an H200 for a 16-bit model; in the
    place of FlashAttention our kernel runs, and what it is given is noted apart."""
    with mock.patch.multiple(backend, **_like_hopper()) if flash else nullcontext():
        return run_requests(**job)


def _like_hopper() -> dict[str, Any]:
    def hoppers_kinds(layer: Any, *given: Any) -> list[str]:
        half = replace(layer, dtype=torch.bfloat16)
        return [kind for kind in KINDS if choose_kernel(half, kind, HOPPER, True, None) == FLASH]

    return {"flash_kinds": hoppers_kinds, "flash_attention": backend.canvas_attention}


def run_requests(
    checkpoint: str,
    page_size: int = 16,
    graphs: list[int] | None = None,
    is_async: bool = False,
) -> dict[str, Any]:
    """The tokens, the logits of every step and the calls of our kernel of two requests.

    With ``graphs``, which are numbers of tokens, batches of canvases alone are full graphs.
    ``is_async``: with asynchronous scheduling.
    """
    of_cuda = graphs_of_cuda(FULL, graphs) if graphs else nullcontext()
    with of_cuda, asynchronous_platform() if is_async else nullcontext():
        engine = Engine(
            checkpoint,
            max_model_len=128,
            max_num_batched_tokens=64,
            block_size=page_size,
            attention_config={"backend": "CUSTOM"},
            async_scheduling=is_async,
        )
    replayed: list[tuple[int, int]] = []
    if graphs:
        run_as_on_cuda(engine.runner)
        replayed = capture(engine.runner)["model"]
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    calls: list[Any] = []
    flash_calls: list[Any] = []
    attend = backend.canvas_attention

    def note(found: list[Any]) -> Any:
        def look(
            starts: Any, is_causal: Any, seq_lens: Any, options: Any, is_anchored: bool
        ) -> None:
            numbers = starts.diff(), is_causal, seq_lens
            rows = list(zip(*(each.tolist() for each in numbers), strict=True))
            found.append((options.mask.window, is_anchored, rows))

        look = tape.as_launch(look)  # in each replay, too

        def spy(query: Any, cache: Any, batch: Any, options: Any, out: Any) -> None:
            is_anchored = batch.first_keys is not None
            look(batch.query_start_loc, batch.is_causal, batch.seq_lens, options, is_anchored)
            attend(query, cache, batch, options, out)

        return spy

    checks = {
        name: mock.Mock(wraps=getattr(backend, name)) for name in ("check_inputs", "check_write")
    }
    attends = {"canvas_attention": note(calls), "flash_attention": note(flash_calls)}
    prompts = [[20 + 3 * i for i in range(37)], [400 - i for i in range(5)]]
    params = [SamplingParams(max_tokens=24, seed=n, ignore_eos=True) for n in (1, 2)]
    with mock.patch.multiple(backend, **checks, **attends):
        runs = engine.runs(prompts, params)
    return {
        "checkpoint": checkpoint,
        "prompts": prompts,
        "tokens": [run.tokens for run in runs],
        "logits": [run.logits for run in runs],
        "checks": {name: check.call_count for name, check in checks.items()},
        "layers": sum(hasattr(layer, "kv_cache") for layer in layers.values()),
        "calls": calls,
        "flash_calls": flash_calls,
        "replayed": replayed,
        "faults": dict(tape.FAULTS),
    }


if __name__ == "__main__":
    serve_with_triton_kernel()
    jobs = json.loads(sys.argv[1])
    results = {name: run(**job) for name, job in jobs.items()}
    torch.save(results, sys.argv[2])
