"""Peak bytes of the sampling step, from the hidden states of the canvas rows on.

The head is part of it, because its logits are most of what there is. Computed from shapes, for the
26B model's vocabulary and hidden size, and measured where that fits a memory limit: on a CPU as the
largest sum of live allocations that PyTorch's profiler saw, on a GPU as the allocator's maximum.

Computed, in bytes for N rows and a vocabulary of V, persistent state left out:

    built-in, GPU    N V (2 + 4)     bf16 logits of the head while their soft cap makes fp32 ones,
                                     then fp32 logits and bf16 probabilities
    built-in, CPU    N V (4 + 16)    fp32 logits, and at its widest four fp32 tensors of the same
                                     shape in `sample_row_stats_reference`
    ours             n V (2 + 4)     the same head, n = min(N, rows that fit the workspace); then
                                     fp32 logits alone: the statistics keep a tile of a few rows

With the exact soft embedding ours holds n V (4 + 2) at its second widest point.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.sampling_peers import Shape, make_embeddings, prepare_builtin, prepare_ours
from dllm.settings.server import PluginOptions

VOCAB, CANVAS, SOFTCAP = 262_144, 256, 30.0
NUM_CANVASES = (1, 8, 32, 64)
SMOKE_CANVASES = (2,)
# The hidden size does not matter to what is counted here; a small one is quick.
HIDDEN = 64
MEASURED_UP_TO = 8 << 30


@dataclass(frozen=True)
class Memory:
    """One line of the CSV: bytes."""

    implementation: str
    canvases: int
    rows: int
    vocab_size: int
    computed_bytes: int
    measured_bytes: int | None


def rows_at_once(vocab_size: int) -> int:
    """Rows of fp32 logits that the default workspace holds, as `dllm.engine.logit_rows`."""
    return max(1024, (PluginOptions().logits_workspace_mib << 20) // (4 * vocab_size))


def computed_bytes(implementation: str, num_rows: int, vocab_size: int) -> int:
    """The peak; see the top of the file."""
    if implementation == "ours":
        return min(num_rows, rows_at_once(vocab_size)) * vocab_size * (2 + 4)
    return num_rows * vocab_size * (2 + 4 if implementation == "built-in, GPU" else 4 + 16)


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """The most that was allocated at once during a call, beyond what was there before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    """bf16 logits, soft-capped in fp32, as one fused operation would: [rows, V]."""
    logits = hidden @ weight.T
    capped = logits.float()
    del logits
    return capped.div_(SOFTCAP).tanh_().mul_(SOFTCAP)


def prepare(implementation: str, shape: Shape, device: str) -> Callable[[], object]:
    """The head and the sampling step, in tiles of whole canvases for ours."""
    weight = make_embeddings(shape, device)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(shape.num_rows, shape.hidden, generator=generator).bfloat16().to(device)
    hidden *= 20  # a spread that makes some tokens likely
    if implementation != "ours":
        step = prepare_builtin(shape, weight)
        return lambda: step(head(hidden, weight))
    ours = prepare_ours(shape, weight, is_exact=False, is_compiled=False)
    tile = rows_at_once(shape.vocab_size) // shape.canvas_length * shape.canvas_length

    def run() -> None:
        for first in range(0, shape.num_rows, tile):
            ours(head(hidden[first : first + tile], weight))

    return run


def measure_memory(device: str, is_smoke: bool) -> list[Memory]:
    """All implementations at all numbers of canvases; measured where the estimate fits."""
    lines = []
    vocab_size, canvas = (9000, 8) if is_smoke else (VOCAB, CANVAS)
    for implementation in ("ours", "built-in, CPU", "built-in, GPU"):
        for num_canvases in SMOKE_CANVASES if is_smoke else NUM_CANVASES:
            num_rows = num_canvases * canvas
            estimate = computed_bytes(implementation, num_rows, vocab_size)
            is_here = (
                implementation == "ours"
                or implementation.endswith(device.upper())
                or (implementation.endswith("GPU") and device == "cuda")
            )
            measured = None
            if is_here and estimate <= MEASURED_UP_TO:
                shape = Shape(num_canvases, canvas, vocab_size, HIDDEN, "open")
                run = prepare(implementation, shape, device)
                measured = peak_bytes(run, device)
            lines.append(
                Memory(implementation, num_canvases, num_rows, vocab_size, estimate, measured)
            )
            shown = "" if measured is None else f", measured {measured / 2**30:6.2f} GiB"
            print(f"{implementation:14} {num_canvases:3} canvases: "
                  f"{estimate / 2**30:6.2f} GiB{shown}", flush=True)  # fmt: skip
    return lines
