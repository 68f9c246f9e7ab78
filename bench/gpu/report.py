"""What the engines of a folder have found: ms a pass at each load, and time by kind of kernel."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

from bench.gpu.engine import PASSES

States = Mapping[str, Mapping[str, Any]]  # by engine: what ``engine.State`` has written

# The first whose pattern is found in a kernel's name.
KINDS = (
    ("experts, products", r"cutlass.*(group|moe)|GroupProblem|fused_moe_kernel|grouped"),
    (
        "attention",
        r"FlashAttention|flash_fwd|FlashAttn|cute.*[Ff]wd|canvas_attention|merge_splits|"
        r"unified_attention|kernel_.*attention|combine",
    ),
    ("row statistics", r"_(tile|row|cutoff|probs)_kernel|row_stats"),
    ("soft embeddings", r"_(heavy|product)_kernel"),
    ("FP8 products", r"cutlass.*(fp8|e4m3|scaled)|scaled_mm|sm90_fp8|gemm_universal|GemmUniversal"),
    (
        "bf16 products (head, the built-in's soft embeddings)",
        r"nvjet|cublas|gemm|splitKreduce|s16816",
    ),
    ("routing", r"routing|topk|moe_align|permute|expert|sort_"),
    ("quantizing", r"quant|fp8"),
    ("soft-capping, norms (Inductor)", r"^triton_"),
    ("cache writes", r"write_kv|reshape_and_cache"),
    ("copies", r"Memcpy|Memset|copy|fill"),
)


def report(states: States) -> str:
    """All engines, then all kinds of kernels of each load, a column for each engine."""
    lines: list[str] = []
    for name, state in states.items():
        lines += ["", f"== {name}: {state['stage']}; {state.get('what')}; {state['seconds']}"]
        lines += [f"    {line[:220]}" for line in state["log"][-14:]]
        if "error" in state:
            lines.append(f"    ...{state['error'][-1500:]}")
        for load, blocks in state["ms"].items():
            middle = statistics.median(blocks)
            lines.append(f"  {load} at once: {middle / PASSES:7.3f} ms a pass, of blocks {blocks}")
    for load in sorted({load for state in states.values() for load in state["kernels"]}, key=int):
        lines += ["", f"ms a pass by kind, {load} at once: {', '.join(states)}"]
        for kind, row in by_kind(states, load):
            lines.append(f"  {kind:40}" + "".join(f"{ms:9.3f}" for ms in row.values()))
    return "\n".join(lines)


def by_kind(states: States, load: str) -> list[tuple[str, dict[str, float]]]:
    """The kinds by their largest time, with ms a pass of each engine."""
    sums: dict[str, dict[str, float]] = {}
    for name, state in states.items():
        for ms, _, kernel in state["kernels"].get(load, ()):
            kind = next((kind for kind, found in KINDS if re.search(found, kernel)), "else")
            sums.setdefault(kind, dict.fromkeys(states, 0.0))[name] += ms / PASSES
    return sorted(sums.items(), key=lambda item: -max(item[1].values()))
