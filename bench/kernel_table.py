"""How long each kernel runs in a pass of the canvases, from torch.profiler; no trace is kept.

The same requests are profiled twice, with answers of one block and of several. The difference is
what the further blocks took: no prompts, but all that belongs to a block, its commit included.
Divided by the passes of those blocks it is the time of one: a denoise step, or a pass of its own
that writes a block's KV. On a CPU operations stand in for kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

NUM_SHOWN = 12
NAME_LENGTH = 160  # templates of C++ go on for pages

# Classes of kernels: the first whose word is in a kernel's name. Products come late, because the
# names of cutlass and cuBLAS are in those of fused kernels.
ATTENTION, EXPERTS, SAMPLER, PRODUCTS, REST = (
    *("attention", "experts", "sampler", "other products", "rest"),
)
WORDS = {
    ATTENTION: ("attention", "merge_splits", "write_kv", "reshape_and_cache", "segments", "flash"),
    EXPERTS: ("moe", "grouped", "groupproblemshape", "expert", "topk"),
    SAMPLER: ("_block_kernel", "_merge_kernel", "_cutoff_kernel", "_probs_kernel", "_kept_tiles"),
    PRODUCTS: ("gemm", "nvjet", "cutlass", "cublas", "splitk", "_product_kernel", "::mm", "linear"),
}


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel while ``work`` runs, summed over its launches."""
    has_gpu = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if has_gpu else kinds.CPU]) as profiler:
        work()
        if has_gpu:
            torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        spent_us = event.self_device_time_total if has_gpu else event.self_cpu_time_total
        if spent_us and not event.is_user_annotation:  # one that spans kernels
            times[event.key[:NAME_LENGTH]] += spent_us / 1e3
    return dict(times)


def class_of(kernel: str) -> str:
    """Its class, judged by its name."""
    name = kernel.lower()
    return next((kind for kind, words in WORDS.items() if any(w in name for w in words)), REST)


def table_rows(
    fewer: Mapping[str, float], more: Mapping[str, float], passes: int
) -> list[dict[str, object]]:
    """Milliseconds and share of each kernel in a pass, longest first.

    Args:
        fewer, more: times of two runs, the second with ``passes`` more.
    """
    pass_ms = {name: (time - fewer.get(name, 0.0)) / passes for name, time in more.items()}
    # A kernel of prompts takes as long in both: what is left of it is noise around zero.
    kept = {name: time for name, time in pass_ms.items() if time > 0}
    total = sum(kept.values())
    return [
        {"kernel": name, "class": class_of(name), "ms": time, "share": time / total}
        for name, time in sorted(kept.items(), key=lambda one: -one[1])
    ]


def shown(rows: Sequence[Mapping[str, object]]) -> str:
    """The longest of them, and how long all take together."""
    total = sum(float(str(row["ms"])) for row in rows)
    lines = [f"  kernels: {total:.3f} ms a pass"]
    for row in rows[:NUM_SHOWN]:
        lines.append(f"  {row['ms']:9.3f} ms {row['share']:6.1%}  {row['class']}: {row['kernel']}")
    return "\n".join(line[:140] for line in lines)
