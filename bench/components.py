"""The products of a denoise pass one by one, in plain PyTorch, beside their floors; needs no vLLM.

    python -m bench.components                    # the released shape on a GPU, batch 1, 8, 32
    python -m bench.components --toy              # checkpoints/tiny-random's shape, any device

What torch's own bf16 kernels take for each component that `bench.roofline` counts: projections,
dense MLP, router, experts (a grouped product over experts chosen at random), self-conditioning,
head, soft embedding, and ours for the statistics. Attention has a bench of its own
(`bench.attention`). The sum is no pass of an engine: no norms, no cache, no scheduler; it says how
much of the floor plain kernels reach. On a GPU times are of CUDA graph replays, between events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.context import RESULTS, ROOT, provenance, write_csv
from bench.released import FULL, read_config
from bench.roofline import H200, Pass, components
from dllm.ops.dispatch import row_stats

Call = Callable[[], object]


def calls(text: dict[str, Any], rows: int, device: str) -> dict[str, list[tuple[Call, int]]]:
    """By component: calls, and how often a pass does each; tensors are random."""
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]

    def random(*size: int) -> Tensor:
        scale = size[-1] ** -0.5
        return torch.randn(*size, dtype=torch.bfloat16, device=device) * scale

    x, table = random(rows, hidden), random(vocab, hidden)
    up, down = random(2 * inner, hidden), random(hidden, inner)

    def gated() -> Tensor:
        gate, linear = F.linear(x, up).chunk(2, dim=-1)
        return F.linear(F.gelu(gate, approximate="tanh") * linear, down)

    num_layers = len(text["layer_types"])
    found: dict[str, list[tuple[Call, int]]] = {"self-conditioning": [(gated, 1)]}
    for kind in sorted(set(text["layer_types"]), reverse=True):
        found |= _projections(text, kind, x, random)
    found["dense MLP"] = [(gated, num_layers)]
    if text["num_experts"]:
        router = random(text["num_experts"], hidden)
        found["router"] = [(lambda: F.linear(x, router), num_layers)]
        found["experts"] = [(_experts(text, x, random), num_layers)]
    logits, probs = torch.empty(rows, vocab, device=device).normal_(), random(rows, vocab)
    temperature = torch.full((rows,), 0.6, device=device)
    keys = torch.arange(2 * rows, device=device).reshape(rows, 2)
    found["head"] = [(lambda: F.linear(x, table).float(), 1)]
    found["statistics"] = [(lambda: row_stats(logits, temperature, keys, None), 1)]
    found["soft embedding"] = [(lambda: probs @ table, 1)]
    return found


def _projections(
    text: dict[str, Any], kind: str, x: Tensor, random: Callable[..., Tensor]
) -> dict[str, list[tuple[Call, int]]]:
    """Queries, keys and values in one product, and the output; all layers of a kind."""
    is_full, hidden = kind == FULL, text["hidden_size"]
    size = text["global_head_dim" if is_full else "head_dim"]
    keys = text["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    query = text["num_attention_heads"] * size
    into = random(query + keys * size * (1 if is_full else 2), hidden)
    out, attended = random(hidden, query), random(len(x), query)
    count = text["layer_types"].count(kind)
    both: list[tuple[Call, int]] = [
        (lambda: F.linear(x, into), count),
        (lambda: F.linear(attended, out), count),
    ]
    return {f"{kind.partition('_')[0]}: projections": both}


def _experts(text: dict[str, Any], x: Tensor, random: Callable[..., Tensor]) -> Call:
    """The experts of one layer: rows sorted by expert, two grouped products, summed again."""
    num_experts, chosen = text["num_experts"], text["top_k_experts"]
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    up, down = random(num_experts, hidden, 2 * inner), random(num_experts, inner, hidden)
    choice = torch.rand(len(x), num_experts, device=x.device).topk(chosen).indices.flatten()
    order = choice.argsort()
    row = order // chosen
    ends = torch.bincount(choice, minlength=num_experts).cumsum(0).int()

    def run() -> Tensor:
        gate, linear = torch._grouped_mm(x[row], up, offs=ends).chunk(2, dim=-1)
        gated = F.gelu(gate, approximate="tanh") * linear
        product = torch._grouped_mm(gated, down, offs=ends)
        return torch.zeros_like(x).index_add_(0, row, product)

    return run


def milliseconds(call: Call, device: str, repeats: int = 15) -> float:
    """The median of a few runs; on a GPU of graph replays, caches flushed by the other tensors."""
    call()
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(128 << 20, dtype=torch.int8, device=device)  # twice the L2
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start_event, end_event in events:
        flush.zero_()
        start_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)


def measure(config: dict[str, Any], batch: int, device: str) -> list[dict[str, object]]:
    """A row for each component, printed with its floor."""
    text = config["text_config"]
    one = Pass("bf16", batch, 0, config["canvas_length"])
    floors = {work.component: work.floor_ms(H200) for work in components(text, one)}
    rows: list[dict[str, object]] = []
    print(f"batch {batch}, {one.rows} rows, bf16, {device}")
    for component, parts in calls(text, one.rows, device).items():
        value = sum(count * milliseconds(call, device) for call, count in parts)
        floor = floors[component] if device == "cuda" else None  # a floor of another machine
        share = "" if floor is None else f"  floor {floor:8.3f} ms, {floor / value:4.0%} of it"
        print(f"  {component:24} {value:9.3f} ms{share}", flush=True)
        rows.append({"batch": batch, "component": component, "ms_per_pass": value})
        rows[-1]["h200_floor_ms"] = floor
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV after every batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--toy", action="store_true", help="a tiny shape, on any device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.toy:
        print("There is no GPU: --toy runs a tiny shape anywhere.", file=sys.stderr)
        return 2
    config = read_config(ROOT / "checkpoints" / "tiny-random" if options.toy else None)
    shared = provenance("bench.components")
    if device == "cuda":
        shared["machine"] = torch.cuda.get_device_name()
    rows: list[dict[str, object]] = []
    for batch in options.batch:
        rows += measure(config, batch, device)
        path = options.results / f"components_{device}.csv"
        write_csv(path, [row | shared for row in rows])
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
