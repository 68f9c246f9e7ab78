"""Runs vLLM's engine with our CUDA attention backend, in Triton's interpreter.

    python attention_backend_worker.py CHECKPOINT OUTPUT [PAGE_SIZE [TOKENS [flash]]]

With ``flash`` kernels are chosen as on an H200 for a 16-bit model; in the place of FlashAttention
our kernel runs, and it is noted when.

``test_attention_backend.py`` starts it as a process of its own, because ``TRITON_INTERPRET=1`` has
to be set before triton is imported. vLLM's CPU platform knows one backend only; here it returns
ours. So metadata builder, implementation and cache layout are those of a CUDA server.
"""

import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"

import torch
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.support.engine_harness import Engine
from tests.support.interpreter import speed_up

BACKEND = "dllm.attention.backend.CanvasAttentionBackend"


def serve_with_triton_kernel() -> None:
    """Make vLLM's CPU platform choose our backend, and the interpreter faster."""
    speed_up()
    # The plugin registers it only on platforms other than a CPU.
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: BACKEND)


def main(
    checkpoint: str, output: str, page_size: str = "16", num_tokens: str = "24", flash: str = ""
) -> None:
    """Generate, and save the tokens, the logits of every step and the arguments of our kernel."""
    from dllm.attention import backend

    serve_with_triton_kernel()
    engine = Engine(
        checkpoint,
        max_model_len=128,
        max_num_batched_tokens=64,
        block_size=int(page_size),
        attention_config={"backend": "CUSTOM"},
    )
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    calls, is_flash = [], []
    attend = backend.canvas_attention
    checks = Counter()

    def counted(name, check):
        def count(*args):
            checks[name] += 1
            check(*args)

        return count

    for name in ("check_inputs", "check_write"):
        setattr(backend, name, counted(name, getattr(backend, name)))

    def spy(query, cache, batch, options, out):
        is_anchored = batch.first_keys is not None
        lens = batch.query_start_loc.diff().tolist()
        calls.append((is_anchored, list(zip(lens, batch.is_causal.tolist(), strict=True))))
        is_flash.append(False)
        return attend(query, cache, batch, options, out)

    def flash_spy(*given):
        spy(*given)
        is_flash[-1] = True

    backend.canvas_attention, backend.flash_attention = spy, flash_spy
    if flash:
        kinds = backend.flash_kinds
        backend.flash_kinds = lambda arch, head_size, dtype, mask, has_flash, option: kinds(
            90, head_size, torch.bfloat16, mask, True, option
        )
    prompts = [[20 + 3 * i for i in range(37)], [400 - i for i in range(5)]]
    length = int(num_tokens)
    params = [SamplingParams(max_tokens=length, seed=seed, ignore_eos=True) for seed in (1, 2)]
    runs = engine.runs(prompts, params)
    torch.save(
        {
            "prompts": prompts,
            "tokens": [run.tokens for run in runs],
            "logits": [run.logits for run in runs],
            "checks": dict(checks),
            "layers": sum(hasattr(layer, "kv_cache") for layer in layers.values()),
            "calls": calls,
            "is_flash": is_flash,
        },
        output,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
