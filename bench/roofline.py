"""The least time that a pass can take on a GPU: bytes and operations by component, from the config.

    python -m bench.roofline                                   # the released model on an H200
    python -m bench.roofline --weights fp8 --context 8192 --batch 1

A denoise pass over B canvases of C rows, each behind n tokens of context. Every component reads its
inputs once and writes its outputs once, at the speed of a copy, and computes at the speed of a
large matrix product; its floor is the larger of the two times. The floor of a pass is their sum.

    weights     bf16: 2 bytes. fp8: 1 byte in attention, MLP and experts, products in FP8. nvfp4:
                4.5 bits there (a scale for 16 numbers), products in bf16, as Hopper does them.
                Embedding, head, router and self-conditioning stay 16-bit.
    experts     those that N = B * C rows touch if each takes k at random: E (1 - (1 - k/E)^N)
    residual    the two sublayers of a layer read and write the hidden states
    head        logits leave in fp32; statistics and the exact soft embedding read them once each

tokens/s is at 16 denoise steps for every block, without what it costs to write the block's keys and
values. The H200's copy and bf16 product were measured on one (2026-10-28: 4.3 TB/s, 788 TFLOP/s on
random data). Its FP8 peak was not measured: it is twice the bf16 one, as in the datasheet.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.context import Row, Rows, command_line, publish
from bench.tables import Section, markdown
from bench.toys.tiny import tiny_config

SLIDING, FULL = "sliding_attention", "full_attention"
# The shape of google/diffusiongemma-26B-A4B-it: its text_config is its Gemma 4 26B-A4B backbone's.
# tests/bench/test_bench_roofline.py counts the published numbers of parameters from it.
RELEASED = {
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "final_logit_softcapping": 30.0,
}
CANVAS_LENGTH = 256
FIXED_STEPS = 16
BF16, FP32 = 2, 4  # bytes
WEIGHT_BYTES = {"bf16": BF16, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}


def released_config() -> dict[str, Any]:
    """config.json of the released model as nested plain data; with the smallest vision tower."""
    return tiny_config(canvas_length=CANVAS_LENGTH, **RELEASED)


# Of an H200: bytes, and operations in bf16 and in FP8, a second.
COPY, BF16_PEAK, FP8_PEAK = 4.3e12, 788e12, 2 * 788e12


class Work(NamedTuple):
    """What a component moves and computes in one pass; ``is_low`` where it does so in FP8."""

    component: str
    num_bytes: float
    flops: float
    is_low: bool = False

    def times_ms(self) -> tuple[float, float]:
        """The times of moving the bytes and of the operations; the floor is the larger one."""
        peak = FP8_PEAK if self.is_low else BF16_PEAK
        return 1e3 * self.num_bytes / COPY, 1e3 * self.flops / peak

    def times(self, count: int) -> Work:
        """The same work in ``count`` layers."""
        return self._replace(num_bytes=count * self.num_bytes, flops=count * self.flops)


class Pass(NamedTuple):
    """What a forward pass is of: ``batch`` canvases, each behind ``context`` tokens.

    ``weights`` is a key of ``WEIGHT_BYTES``, ``canvas`` the rows of each.
    """

    weights: str
    batch: int
    context: int
    canvas: int


def products(name: str, rows: int, weight_bytes: float, *shapes: tuple[int, int]) -> Work:
    """Products ``[rows, inner] @ [inner, outer]``, one after the other, of 16-bit activations."""
    size = sum(inner * outer for inner, outer in shapes)
    moved = weight_bytes * size + BF16 * rows * sum(map(sum, shapes))
    return Work(name, moved, 2.0 * rows * size, is_low=weight_bytes == 1)


def components(text: dict[str, Any], one: Pass) -> list[Work]:
    hidden, vocab, inner = text["hidden_size"], text["vocab_size"], text["intermediate_size"]
    rows, weight = one.batch * one.canvas, WEIGHT_BYTES[one.weights]
    gated = (hidden, 2 * inner), (inner, hidden)  # gate and up in one product, then down
    works = [
        Work("embedding", 2.0 * BF16 * rows * hidden, 0),
        products("self-conditioning", rows, BF16, *gated),
    ]
    for kind in sorted(set(text["layer_types"]), reverse=True):
        works += _attention(text, one, kind)
    num_experts, chosen = text["num_experts"], text["top_k_experts"]
    size = 3 * hidden * text["moe_intermediate_size"]
    touched = num_experts * (1 - (1 - chosen / num_experts) ** rows)
    moved = weight * size * touched + 2.0 * BF16 * rows * hidden
    in_layers = [
        products("dense MLP", rows, weight, *gated),
        products("router", rows, BF16, (hidden, num_experts)),
        Work("experts", moved, 2.0 * size * chosen * rows, weight == 1),
        Work("residual stream", 4.0 * BF16 * rows * hidden, 0),
    ]
    logits, product = float(FP32) * rows * vocab, 2.0 * rows * vocab * hidden
    embedding = BF16 * (vocab + rows) * hidden
    return [
        *works,
        *(work.times(len(text["layer_types"])) for work in in_layers),
        Work("head", embedding + logits, product),
        Work("statistics", logits, 0),
        Work("soft embedding", logits + embedding, product),
    ]


def _attention(text: dict[str, Any], one: Pass, kind: str) -> list[Work]:
    """Projections, and attention over the cache, of all layers of a kind.

    Full layers have no values of their own (k = v), so one product less; both are cached.
    """
    is_full, name = kind == FULL, kind.partition("_")[0]
    kv_heads = text["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    size = text["global_head_dim" if is_full else "head_dim"]
    query, hidden, rows = (
        text["num_attention_heads"] * size,
        text["hidden_size"],
        one.batch * one.canvas,
    )
    keys = kv_heads * size * (1 if is_full else 2)
    seen = one.canvas + (one.context if is_full else min(one.context, text["sliding_window"] - 1))
    # Queries and results, and every visible key and value once.
    moved = 2.0 * BF16 * one.batch * (one.canvas * query + seen * kv_heads * size)
    attention = Work(f"{name}: attention", moved, 4.0 * query * rows * seen)
    shapes = (hidden, query + keys), (query, hidden)
    projections = products(f"{name}: projections", rows, WEIGHT_BYTES[one.weights], *shapes)
    return [work.times(text["layer_types"].count(kind)) for work in (projections, attention)]


# --- output --------------------------------------------------------------------------------------


def floors(rows: Rows) -> str:
    """The least time of a pass, and the speed that it allows."""
    lines = [
        [row["weights"], row["batch"], f"{float(row['floor_ms']):.1f}"]
        + [f"{float(row['tokens_per_s']):,.0f}"]
        for row in rows
    ]
    return markdown(["weights", "batch", "floor, ms a pass", "tokens/s at most"], lines)


SECTION = Section("roofline.csv", "python -m bench.roofline", floors)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHT_BYTES), default=[*WEIGHT_BYTES])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens before each canvas")
    options = parser.parse_args(arguments)
    text = released_config()["text_config"]
    rows: list[Row] = []
    for weights, batch in itertools.product(options.weights, options.batch):
        one = Pass(weights, batch, options.context, CANVAS_LENGTH)
        works = components(text, one)
        floor_ms = sum(max(work.times_ms()) for work in works)
        speed = 1e3 * batch * one.canvas / (FIXED_STEPS * floor_ms)
        print(
            f"H200, {weights}, batch {batch}, context {one.context}: at least "
            f"{floor_ms:.2f} ms a pass, at most {speed:,.0f} tokens/s"
        )
        print(f"  {'':24} {'GB':>9} {'TFLOP':>9} {'ms: bytes':>10} {'operations':>10}")
        for work in works:
            cells = work.num_bytes / 1e9, work.flops / 1e12, *work.times_ms()
            print("  {:24} {:9.3f} {:9.3f} {:10.3f} {:10.3f}".format(work.component, *cells))
        about = {"gpu": "H200", "weights": weights, "batch": batch, "context": one.context}
        rows.append(about | {"floor_ms": floor_ms, "tokens_per_s": speed})
    publish(options.results / SECTION.file, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
