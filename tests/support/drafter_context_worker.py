"""Runs vLLM's engine with a drafter on our CUDA kernels, in Triton's interpreter.

    python drafter_context_worker.py TARGET DRAFTER OUTPUT

A process of its own, as ``attention_backend_worker`` says. The target's KV cache is FP8.
"""

import sys

# First: it turns the interpreter on.
from tests.support.attention_backend_worker import serve_with_triton_kernel  # isort: skip

from pathlib import Path
from typing import Any

import torch

from tests.support.drafter_harness import (
    drafting_engine,
    greedy,
    prompt,
    watch_context,
    watch_drafts,
)


def main(target: str, drafter: str, output: str) -> None:
    """Generate, and save drafts, hidden states, and which way the context was written."""
    from dllm.attention import context_kv
    from dllm.drafter.network import DrafterNetwork
    from dllm.drafter.pair import drafter_config

    serve_with_triton_kernel()
    taken = []
    write, project = context_kv.write_context_kv, DrafterNetwork._project_context_kv

    def spy_write(*args: Any) -> None:
        taken.append("kernel")
        write(*args)

    def spy_project(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append("vLLM")
        return project(*args)

    context_kv.write_context_kv = spy_write
    DrafterNetwork._project_context_kv = spy_project  # type: ignore[method-assign]
    engine = drafting_engine(
        Path(target), Path(drafter), 3, kv_cache_dtype="fp8", block_size=16,
        attention_config={"backend": "CUSTOM"}, speculative={"attention_backend": "CUSTOM"},
    )  # fmt: skip
    with watch_context(engine) as states, watch_drafts(engine) as seen:
        tokens = engine.generate([prompt(37)], greedy(5))
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    saved = {
        "taken": taken,
        "tokens": tokens,
        "drafts": seen,
        "states": states,
        "config": drafter_config(engine.runner.vllm_config),
        "dtypes": [layer.kv_cache.dtype for layer in layers.values()],
    }
    torch.save(saved, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
