"""The launches of every Triton kernel of the project, on the meta device, by the code that serves.

    python -m tests.support.kernel_launches 90

It prints a JSON object: ``compiled``, what became of each kernel on that GPU; on Hopper also
``variants``, how many kernels of each name the batches of a server compile. A process of its own:
the interpreter must not be on, and Triton stays out of the other tests'.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm.attention.cache_write import write_kv
from dllm.attention.canvas_attention import batch_shape, launch
from dllm.attention.context_kv import write_context_kv
from dllm.attention.inputs import AttentionOptions, ContextWeights, PagedKV, RaggedBatch
from dllm.attention.masks import ALL, Mask
from dllm.attention.planning import plan_attention
from dllm.attention.tuning import TileConfig, tile_config
from dllm.attention.visible_pages import VisiblePages
from dllm.grammar import kernels as grammar
from dllm.grammar.device import CHUNK, LABEL_CHUNK, PackedTables, Searches
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats, tile_width
from dllm.ops.row_stats_gpu import row_stats_kernels
from dllm.ops.soft_embedding import Shard, skipped_mass
from dllm.ops.tile_product_gpu import product_tiles, tile_product_kernels
from tests.support.compiled_kernels import recorded

VOCAB, HIDDEN, CAP = 262144, 2816, 30.0  # of DiffusionGemma 26B-A4B
CANVAS, DRAFTS, MAX_TOKENS, MAX_SEQS, MAX_LEN = 256, 8, 8192, 64, 131072
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Layer(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    mask: Mask = ALL


SLIDING = Layer("sliding-anchored", 16, 8, 256, Mask(1024, is_anchored=True))
SYMMETRIC = SLIDING._replace(name="sliding-symmetric", mask=Mask(1024))
FULL = Layer("full", 16, 2, 512)
DRAFTER = Layer("drafter", 32, 8, 128)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


# --- attention and cache -------------------------------------------------------------------------


def paged(layer: Layer, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> PagedKV:
    """Views of vLLM's ``[pages, heads, page_size, 2 * head_size]`` cache."""
    both = meta(100, layer.num_kv_heads, page_size, 2 * layer.head_size, dtype=cache_dtype)
    key, value = both.transpose(1, 2).split(layer.head_size, dim=-1)
    scale = None if cache_dtype == dtype else meta(1)
    return PagedKV(key, value, scale, scale)


def attend(
    layer: Layer,
    arch: int,
    *,
    num_seqs: int = 3,
    num_tokens: int = 3 * CANVAS,
    max_seq_len: int = MAX_LEN,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    options: AttentionOptions | None = None,
    tiles: TileConfig | None = None,
) -> None:
    """One step of a server in one layer. Its tensors are slices of those of the largest batch."""
    cache = paged(layer, page_size, dtype, cache_dtype or dtype)
    batch = RaggedBatch(
        query_start_loc=ints(MAX_SEQS + 1)[: num_seqs + 1],
        seq_lens=ints(MAX_SEQS)[:num_seqs],
        block_tables=ints(MAX_SEQS, MAX_LEN // page_size)[:num_seqs],
        is_causal=ints(MAX_SEQS)[:num_seqs],
        first_keys=ints(MAX_SEQS)[:num_seqs] if layer.mask.is_anchored else None,
        max_query_len=DRAFTS if layer is DRAFTER else MAX_TOKENS,
        max_seq_len=max_seq_len,
    )
    width = layer.num_heads * layer.head_size
    query = meta(MAX_TOKENS, width, dtype=dtype)[:num_tokens].view(num_tokens, -1, layer.head_size)
    options = options or AttentionOptions(layer.head_size**-0.5, layer.mask)
    tiles = tiles or tile_config(layer.head_size, dtype.itemsize, arch, cache.is_fp8)
    shape = batch_shape(query, cache, batch)
    plan = plan_attention(shape, tiles, options.mask.window)
    workspace = query.new_empty(plan.workspace_elements(shape), dtype=torch.float32)
    launch(query, cache, batch, options, torch.empty_like(query), plan, workspace)


def shorten(shorter: VisiblePages, num_seqs: int, max_query_len: int, max_seq_len: int) -> None:
    """A step for FlashAttention in a layer with a window; more sequences than its memory is for."""
    batch = RaggedBatch(
        query_start_loc=ints(2 * MAX_SEQS + 1)[: num_seqs + 1],
        seq_lens=ints(2 * MAX_SEQS)[:num_seqs],
        block_tables=ints(2 * MAX_SEQS, MAX_LEN // 64)[:num_seqs],
        is_causal=ints(2 * MAX_SEQS)[:num_seqs],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    shorter(batch)


def shorter() -> VisiblePages:
    assert SYMMETRIC.mask.window is not None
    return VisiblePages(SYMMETRIC.mask.window, 64, MAX_SEQS, MAX_TOKENS, torch.device("meta"))


def write_cache(layer: Layer, num_tokens: int, cache_dtype: torch.dtype = BF16, first: int = 0):
    """The keys and values of a step; its slots begin anywhere in a buffer."""
    qkv = meta(MAX_TOKENS, layer.num_heads + 2 * layer.num_kv_heads, layer.head_size, dtype=BF16)
    key, value = qkv[:num_tokens, layer.num_heads :].split(layer.num_kv_heads, dim=1)
    slots = meta(2 * MAX_TOKENS, dtype=torch.int64)[first : first + num_tokens]
    write_kv(key, value, paged(layer, 64, BF16, cache_dtype), slots)


def write_context(
    num_tokens: int,
    first: int = 0,
    *,
    layer: Layer = DRAFTER,
    hidden: int = 4096,
    rotary_size: int = DRAFTER.head_size,
    has_bias: bool = False,
    is_neox: bool = True,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """The context of Qwen3-8B's drafter: five layers, of which the last has a window."""
    layers, size = 5, layer.head_size
    columns = layers * 2 * layer.num_kv_heads * size
    weights = ContextWeights(
        meta(columns, hidden, dtype=dtype), meta(columns, dtype=dtype) if has_bias else None,
        meta(layers, size, dtype=dtype), 1e-6, meta(40960, rotary_size, dtype=dtype), is_neox,
    )  # fmt: skip
    numbers = [meta(2 * MAX_TOKENS, dtype=torch.int64) for _ in range(3)]
    positions, *slots = (each[first : first + num_tokens] for each in numbers)
    caches = [paged(layer, 16, dtype, cache_dtype or dtype) for _ in range(layers)]
    tokens = meta(num_tokens, hidden, dtype=dtype), positions
    write_context_kv(*tokens, weights, caches, [slots[0]] * 4 + [slots[1]])


# --- sampling ------------------------------------------------------------------------------------


def sample(num_rows: int, raw: bool = False, filtered: bool = False, probs: bool = False) -> None:
    """Row statistics, of raw logits or soft-capped ones; rows' numbers are slices anywhere."""
    first = num_rows % 7
    rows = slice(first, first + num_rows)
    temperature, keys = meta(9999)[rows], meta(9999, 2, dtype=torch.int64)[rows]
    filters = None
    if filtered:
        filters = RowFilters(ints(9999)[rows], meta(9999)[rows], meta(9999)[rows])
    logits = meta(num_rows, VOCAB, dtype=BF16 if raw else torch.float32)
    cap = CAP if raw else None
    row_stats_kernels(logits, temperature, keys, BF16 if probs else None, filters, None, cap)


def embed(num_rows: int, arch: int, dtype: torch.dtype = BF16, raw: bool = False) -> None:
    """Soft embeddings, of raw logits or soft-capped ones."""
    weight = meta(VOCAB, HIDDEN, dtype=dtype)
    shard = Shard(weight, 0, VOCAB)
    stats = RowStats._make(meta(num_rows) for _ in RowStats._fields)
    stats = stats._replace(tile_mass=meta(num_rows, VOCAB // tile_width(VOCAB)))
    cut = product_tiles(weight.element_size(), arch)
    logits = meta(num_rows, VOCAB, dtype=BF16 if raw else torch.float32)
    given = logits, meta(num_rows), stats, shard, skipped_mass(dtype), cut
    tile_product_kernels(*given, cap=CAP if raw else None)


def search(rng: random.Random, dtype: torch.dtype = torch.float32) -> None:
    """Canvases under grammars of any sizes."""
    canvases, tables = rng.randint(1, 20), rng.randint(1, 5)
    rows = sum(rng.randint(1, CANVAS) for _ in range(canvases))
    states, classes, edges, chunks, labels = (rng.randint(1, 5000) for _ in range(5))
    packed = PackedTables(
        ints(tables, VOCAB), ints(states * classes), meta(states, dtype=torch.int8), ints(states),
        ints(edges), ints(edges), ints(edges), meta(edges, dtype=torch.int8), ints(states + 1),
        ints(chunks, CHUNK), ints(chunks), ints(labels, LABEL_CHUNK), ints(labels),
        *(ints(tables + 1) for _ in range(5)), ints(tables),
        classes, chunks, labels, labels,
    )  # fmt: skip
    cut, logits = grammar.PathTiles(), meta(rows, VOCAB, dtype=dtype)
    request_of = torch.zeros(rows, dtype=torch.int64, device="meta")
    of_canvas = Searches(
        *(ints(canvases) for _ in range(6)), request_of, rng.randint(1, CANVAS), states
    )
    stops, fillers = (meta(canvases, rng.randint(1, 9), dtype=torch.int64) for _ in range(2))
    grammar.write_paths(logits, logits, packed, of_canvas, stops, fillers, cut)


# --- what is compiled ----------------------------------------------------------------------------

ODD = Layer("odd", 6, 2, 80, Mask(100, is_anchored=True))
ODD_TILES = TileConfig(64, 32, 4, 2, max_splits=4, block_v=64)


def cases(arch: int) -> dict[str, dict[str, Callable[[], None]]]:
    """Groups of launches by label: the released shapes, and on Hopper every branch."""
    rng = random.Random(0)
    groups: dict[str, dict[str, Callable[[], None]]] = {
        "sliding": {
            "symmetric": lambda: attend(SYMMETRIC, arch),
            "visible pages": lambda: shorten(shorter(), 3, CANVAS, MAX_LEN),
        },
        "full": {"full": lambda: attend(FULL, arch)},
        "drafter": {
            "draft": lambda: attend(DRAFTER, arch, page_size=16),
            "context": lambda: write_context(1024),
            "few tokens of context": lambda: write_context(16),
            "cache write": lambda: write_cache(FULL, 256),
        },
        "sampling": {
            "statistics": lambda: sample(256, probs=True),
            "raw": lambda: sample(256, raw=True),
            "raw, filtered": lambda: sample(256, raw=True, filtered=True),
            "soft embeddings": lambda: embed(256, arch),
            "soft embeddings, raw": lambda: embed(256, arch, raw=True),
            "soft embeddings, fp32": lambda: embed(256, arch, torch.float32),
            "grammars": lambda: search(rng),
            "grammars, bf16": lambda: search(rng, BF16),
        },
    }
    if arch >= 90:  # no conversion of e4m3 before
        for name, layer in (("sliding", SLIDING), ("full", FULL)):
            groups[name][f"{name}, fp8 cache"] = lambda layer=layer: attend(
                layer, arch, cache_dtype=FP8
            )
        groups["drafter"]["cache write, fp8"] = lambda: write_cache(SLIDING, 256, FP8)
        groups["drafter"]["context, fp8 cache"] = lambda: write_context(1024, cache_dtype=FP8)
    if arch == 90:
        scale = AttentionOptions(0.1, ODD.mask, 30.0)
        groups["branches"] = {
            "anchored, 16 keys a page": lambda: attend(SLIDING, arch, page_size=16),
            "soft cap, odd sizes": lambda: attend(
                ODD, arch, page_size=24, dtype=torch.float16, options=scale,
                tiles=ODD_TILES,
            ),
            "heads that see blocks": lambda: attend(
                ODD, arch, page_size=32, tiles=ODD_TILES,
                options=AttentionOptions(0.1, Mask(block_length=32)),
            ),
            "context, fp16, interleaved, bias": lambda: write_context(
                1024, layer=DRAFTER._replace(head_size=64), rotary_size=64, has_bias=True,
                is_neox=False, dtype=torch.float16,
            ),
            "context, head size 256, half turned": lambda: write_context(
                1024, layer=DRAFTER._replace(head_size=256, num_kv_heads=4)
            ),
            "context, fp32, odd sizes": lambda: write_context(
                1024, layer=ODD, hidden=1000, rotary_size=80, dtype=torch.float32
            ),
        }  # fmt: skip
    return groups


# Label and kernel: those whose instructions are counted, because they run for every token.
COUNTED = {("statistics", "_tile_kernel"), ("raw", "_tile_kernel")}


def compiled(arch: int) -> list[dict[str, Any]]:
    """What became of each kernel, in the order of the launches; none twice, but among branches."""
    seen: set[tuple[bool, str, str]] = set()
    found = []
    for group, steps in cases(arch).items():
        for label, step in steps.items():
            with recorded() as launches:
                step()
            for variant in launches:
                key = (group == "branches", variant.name, variant.key)
                if key not in seen:
                    seen.add(key)
                    about = {"group": group, "label": label, "kernel": variant.name}
                    is_counted = (label, variant.name) in COUNTED
                    found.append(about | asdict(variant.compiled(arch, is_counted)))
    return found


def variants(num_batches: int = 200) -> dict[str, int]:
    """How many kernels of each name random batches of one server compile.

    Numbers and lengths of sequences, tables and slices differ.
    """
    rng = random.Random(1)
    pages = shorter()
    with recorded() as launches:
        for _ in range(num_batches):
            num_seqs = rng.randint(1, MAX_SEQS)
            num_tokens = rng.randint(1, MAX_TOKENS)
            sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens}
            sizes["max_seq_len"] = rng.choice([1, 300, 700, 5000, 40000, MAX_LEN])
            for layer in (SYMMETRIC, FULL):
                attend(layer, 90, **sizes)
                write_cache(layer, num_tokens, first=rng.randint(0, 99))
            attend(DRAFTER, 90, page_size=16, **sizes)
            shorten(pages, rng.randint(1, 2 * MAX_SEQS), num_tokens, sizes["max_seq_len"])
            write_context(rng.choice([1, 3, 16, 17, num_tokens]), first=rng.randint(0, 99))
            num_rows = rng.randint(1, 4096)
            raw = rng.random() < 0.5
            sample(num_rows, raw, filtered=rng.random() < 0.5)
            embed(num_rows, 90, raw=raw)
            search(rng)
    keys: dict[str, set[str]] = {}
    for variant in launches:
        keys.setdefault(variant.name, set()).add(variant.key)
    return {name: len(found) for name, found in keys.items()}


if __name__ == "__main__":
    arch = int(sys.argv[1])
    print(json.dumps({"compiled": compiled(arch), "variants": variants() if arch == 90 else {}}))
