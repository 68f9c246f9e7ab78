"""Every Triton kernel beside its definition in plain torch, on small tensors of the device.

They are random, the same each time, and of the shapes that a model is served with. A check raises
Wrong for an id that differs, or a number that is farther off than rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.attention.cache_write import write_kv
from dllm.attention.calls import MIXED, calls_of
from dllm.attention.canvas_attention import canvas_attention
from dllm.attention.cases import CAUSAL as CAUSAL_ROWS
from dllm.attention.cases import SCALES, Case, Wrong, make_case, within
from dllm.attention.choice import CAUSAL, KINDS
from dllm.attention.context_kv import write_context_kv
from dllm.attention.flash import flash_attention
from dllm.attention.inputs import ContextWeights, Layer, PagedKV, RaggedBatch
from dllm.attention.reference import context_kv
from dllm.attention.visible_pages import VisiblePages
from dllm.grammar.device import Searches, pack
from dllm.grammar.kernels import write_paths
from dllm.grammar.table import Table
from dllm.grammar.viterbi import Canvas
from dllm.ops.dispatch import GRAMMAR_PATHS, ROW_STATISTICS, SOFT_EMBEDDINGS
from dllm.ops.filters import RowFilters
from dllm.ops.noise import STREAM_GUMBEL, row_keys
from dllm.ops.row_stats import RowStats, reference_row_stats, softcap
from dllm.ops.row_stats_gpu import row_stats_kernels
from dllm.ops.soft_embedding import Shard, skipped_mass
from dllm.ops.tile_product import tile_product
from dllm.ops.tile_product_gpu import product_tiles, tile_product_kernels

# What the names of the checks of our attention and of vLLM's begin with.
ATTENTION, FLASH = "attention", "FlashAttention 4"
NUM_ROWS, VOCAB, HIDDEN = 24, 1100, 96
ROWS_OF_GROUPS = 136  # a group of the soft embeddings' product has 128
CONTEXT = 5000  # more than two parts of a split sequence
SOFTCAP = 30.0  # DiffusionGemma's
FP8_SCALE = 0.25  # of an FP8 cache; a power of two, so that nothing is rounded
# The interpreter truncates to bf16 where a GPU rounds: two units in the last place.
ROUNDINGS = 2.0


Trials = dict[str, Callable[[], None]]  # by the kernel's name; each may raise anything


def canvas_trials(
    layers: dict[str, Layer], flash_layers: dict[str, Layer], device: torch.device
) -> Trials:
    """``layers``: those of the model that differ; FlashAttention serves some rows of the others."""
    return {
        **attention_trials(layers, device),
        **{
            f"{FLASH}, {name}": partial(flash, layer, device)
            for name, layer in flash_layers.items()
        },
        ROW_STATISTICS: lambda: row_statistics(device),
        SOFT_EMBEDDINGS: lambda: soft_embeddings(device),
        GRAMMAR_PATHS: lambda: grammar_paths(device),
    }


def attention_trials(layers: dict[str, Layer], device: torch.device) -> Trials:
    return {
        f"{ATTENTION}, {name}": partial(attention, layer, device, canvas_attention)
        for name, layer in layers.items()
    }


def checks(trials: Trials) -> Iterator[tuple[str, str]]:
    """Run every kernel; (its name, what is wrong with it, "" for nothing)."""
    for name, trial in trials.items():
        try:
            trial()
            yield name, ""
        except Exception as error:  # a compiler's errors have no common class
            yield name, (str(error).strip() or repr(error)).splitlines()[0]


def flash(layer: Layer, device: torch.device, context: int = CONTEXT) -> None:
    """FlashAttention, as a step calls it for causal sequences alone, and beside canvases.

    In a layer with an anchored window our kernel serves the canvases.
    """
    for kind in (CAUSAL, MIXED):
        attention(layer, device, partial(_flash_calls, layer, kind), context, kind)


def _flash_calls(
    layer: Layer, kind: str, query: Tensor, cache: PagedKV, batch: RaggedBatch, *others: Any
) -> None:
    """The arguments are those of `canvas_attention`."""
    served = (CAUSAL,) if layer.mask.is_anchored else KINDS
    shorten = None
    if layer.mask.window is not None:
        sizes = layer.mask.window, cache.page_size, batch.num_seqs, batch.max_query_len
        shorten = VisiblePages(*sizes, query.device)
    # It may read what no row sees, if it leaves it out of its sums: finite numbers.
    tables = batch.block_tables.clamp(min=0)
    cache = replace(cache, key=cache.key.nan_to_num(), value=cache.value.nan_to_num())
    given = replace(batch, block_tables=tables)
    for call in calls_of(given, kind, served, batch.max_query_len, shorten):
        attend = flash_attention if call.is_flash else canvas_attention
        attend(query, cache, call.batch, *others)


def attention(
    layer: Layer,
    device: torch.device,
    attend: Callable[..., Any],
    context: int = CONTEXT,
    kind: str = MIXED,
) -> None:
    """A prompt chunk, a canvas behind a long context, and one behind a short one.

    Args:
        attend: `canvas_attention`, or what takes its arguments.
        context: keys in front of the second canvas.
        kind: CAUSAL: emitted blocks are in the place of the canvases.
    """
    block = layer.mask.block_length
    rows = CAUSAL_ROWS if kind == CAUSAL else 0
    chunk = 3 * max(block, 16), max(block, 16), CAUSAL_ROWS
    case = make_case(
        layer, (chunk, (32, context // block * block, rows), (32, 32, rows)), device=device
    )
    _check_write(case, layer)
    longest, out = int(case.batch.seq_lens.max()), case.poisoned_out()
    batch = replace(case.batch, max_seq_len=longest, max_ahead=0 if rows else 31)
    attend(case.query, case.cache, batch, case.options, out)
    case.check(out, _roundoff(layer.dtype))


def _check_write(case: Case, layer: Layer) -> None:
    """Write a case's keys and values, unused slots as zeros, into an empty cache."""
    cache = case.cache
    stored = [each.float().nan_to_num(0.0) for each in (cache.key, cache.value)]
    scales = (1.0, 1.0) if layer.cache_dtype is None else SCALES
    key, value = (
        (each * scale).to(layer.dtype).flatten(0, 1)
        for each, scale in zip(stored, scales, strict=True)
    )
    written = replace(cache, key=torch.zeros_like(cache.key), value=torch.zeros_like(cache.value))
    write_kv(key, value, written, torch.arange(len(key), device=key.device))
    if not all(map(torch.equal, (written.key.float(), written.value.float()), stored)):
        raise Wrong("keys or values are written wrongly into the cache")


def _roundoff(dtype: torch.dtype) -> float:
    return ROUNDINGS * torch.finfo(dtype).eps / 2


def _empty_cache(layer: Layer, num_pages: int, device: torch.device) -> PagedKV:
    shape = num_pages, layer.page_size, layer.num_kv_heads, layer.head_size
    stored_as, scales = layer.cache_dtype or layer.dtype, []
    if layer.cache_dtype is not None:
        scales = [torch.tensor([FP8_SCALE], device=device)] * 2
    return PagedKV(*(torch.zeros(shape, dtype=stored_as, device=device) for _ in range(2)), *scales)


def drafter_context(layer: Layer, hidden: int, is_neox: bool, device: torch.device) -> None:
    """Keys and values of few tokens and of many, some without a slot, for two layers."""
    num_layers, num_kv_heads, head_size = 2, layer.num_kv_heads, layer.head_size
    rows, angles = num_layers * 2 * num_kv_heads * head_size, _random(40, head_size // 2, seed=4)
    weights = ContextWeights(
        weight=(_random(rows, hidden, seed=1) * hidden**-0.5).to(device, layer.dtype),
        bias=None,
        k_norm=_random(num_layers, head_size, seed=2).tanh().to(device, layer.dtype),
        eps=1e-6,
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(device, layer.dtype),
        is_neox=is_neox,
    )
    for num_tokens in (5, 40):
        states = _random(num_tokens, hidden, seed=3).to(device, layer.dtype)
        places = torch.arange(num_tokens, device=device)
        slots = [torch.where(places % 3 == 1, -1, 2 * places + 1)] * num_layers
        num_pages = 2 * num_tokens // layer.page_size + 2
        caches = [_empty_cache(layer, num_pages, device) for _ in range(num_layers)]
        write_context_kv(states, places, weights, caches, slots)
        compare_context(states, places, weights, caches, slots)


def compare_context(
    states: Tensor,
    positions: Tensor,
    weights: ContextWeights,
    caches: Sequence[PagedKV],
    slots: Sequence[Tensor],
    blank: float = 0.0,
    roundoff: float | None = None,
) -> None:
    """Compare what a kernel left in caches that were full of a number with the definition.

    Args:
        slots: of each layer; what has none, -1, may be anything.
        blank: that number.
        roundoff: of one rounding to the dtype of the caches.
    """
    number, scale = torch.finfo(caches[0].key.dtype), caches[0].k_scale
    unit = 1.0 if scale is None else float(scale)
    roundoff = ROUNDINGS * number.eps / 2 if roundoff is None else roundoff
    # Of fp32 sums; keys are divided by about 1 and turned, which doubles at most.
    sums = 4e-5 * (states.float().abs() @ weights.weight.float().abs().T).nan_to_num().max()
    positions = positions.clamp(max=len(weights.cos_sin) - 1)
    num_kv_heads = caches[0].key.shape[2]
    expected = torch.stack(context_kv(states, positions, weights, num_kv_heads), 1)
    expected = expected.clamp(-unit * number.max, unit * number.max)
    for cache, own, rows in zip(caches, slots, expected, strict=True):
        is_stored = own >= 0
        places, rows = own[is_stored].long(), rows[:, is_stored]
        found = unit * torch.stack([cache.key, cache.value]).float().flatten(1, 2)
        smallest = unit * number.smallest_normal * number.eps
        within(found[:, places] - rows, roundoff * rows.abs() + smallest + sums)
        found[:, places] = blank
        if (found != blank).any():
            raise Wrong("something is written where no token has a slot")


def row_statistics(device: torch.device) -> None:
    """Of logits that are soft-capped, and of raw ones (``_row_statistics``)."""
    _row_statistics(device, None, 3e-5)  # fp32 sums in another order
    _row_statistics(device, SOFTCAP, 3e-4)  # and a reciprocal of fewer digits in each logit


def _row_statistics(device: torch.device, cap: float | None, most: float) -> None:
    """Rows with and without filters."""
    logits, temperature, keys = _rows(device)
    if cap is not None:  # as a model gives them
        logits = logits.bfloat16()
    top_k = torch.full((NUM_ROWS,), VOCAB, dtype=torch.int32, device=device)
    top_k[::2] = 5
    off = torch.ones(NUM_ROWS, device=device)
    given = RowFilters(top_k, off, 0 * off)
    rows = logits, temperature, keys, torch.float32
    found = RowStats._make(row_stats_kernels(*rows, given, None, cap))
    kept = softcap(logits, cap).topk(5, dim=1).values[:, -1]
    cutoff = torch.where(top_k < VOCAB, kept, -torch.inf)
    expected = reference_row_stats(*rows, cutoff, cap)
    compare_statistics(found, expected, most)


def compare_statistics(found: RowStats, expected: RowStats, most: float) -> None:
    """Ids must be the same, except of rows without a distribution, where they mean nothing.

    ``most``: how far nats may be off, and probabilities in parts of themselves.
    """
    for name in ("entropy", "log_z"):
        one, other = getattr(found, name), getattr(expected, name)
        within(torch.where(one == other, 0.0, one - other), most, f"{name}: ")  # inf - inf is NaN
    has_distribution = expected.entropy < torch.inf
    for name in ("argmax", "sample"):
        if not torch.equal(*(getattr(of, name)[has_distribution] for of in (found, expected))):
            raise Wrong(f"{name} differs")
    for name in ("probs", "tile_mass"):
        one, other = getattr(found, name), getattr(expected, name)
        within(one - other, most * other + 1e-30, f"{name}: ")


def soft_embeddings(device: torch.device) -> None:
    """Of raw bf16 logits: sure rows, which keep a tile or two, and rows that keep all.

    There are more of them than one group of the product has.
    """
    logits, temperature, keys = _rows(device, ROWS_OF_GROUPS)
    logits[::2] *= 9
    logits = logits.bfloat16()
    stats = reference_row_stats(logits, temperature, keys, None, cap=SOFTCAP)
    weight = _random(VOCAB, HIDDEN, seed=1).to(device, torch.bfloat16)
    arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    given = temperature, stats, Shard(weight, 0, VOCAB), skipped_mass(weight.dtype)
    cut = product_tiles(weight.element_size(), 10 * arch[0] + arch[1])
    found = tile_product_kernels(logits, *given, cut, 132, SOFTCAP)
    expected = tile_product(softcap(logits, SOFTCAP), *given)
    # The sum over the tokens of p |embedding| is at most the largest number.
    bound = _roundoff(weight.dtype) * (weight.abs().max() + expected.abs())
    within(found.float() - expected.float(), bound)


def grammar_paths(device: torch.device) -> None:
    """Two canvases under a grammar: texts of even length, the second one behind thoughts.

    The last state of its table is that of thoughts; nothing leads back there.
    """
    class_of = (torch.arange(VOCAB) % 3).int().numpy()
    stop = 7
    class_of[stop] = -1
    following = np.array([[1, -1, 1], [0, 0, -1], [2, 0, 2]], dtype=np.int32)
    accepts, left = np.array([True, False, False]), np.array([0, 1, 1], dtype=np.int32)
    table = Table(class_of, following, accepts, left)
    width, budget = NUM_ROWS // 2, 1 << 20
    logits = _rows(device)[0]
    states = (0, 2)
    numbers = [[0, width], [width, width], [0, 0], states, [budget, budget], [budget, 3]]
    parts = torch.tensor(numbers, dtype=torch.int32, device=device)
    request_of = torch.arange(2, device=device).repeat_interleave(width)
    canvases = Searches._make([*parts, request_of, width, 2 * len(accepts)])
    ends = torch.full((2, 1), stop, device=device)
    masked = logits.clone()
    found = write_paths(masked, masked, pack([table], device), canvases, ends, ends)
    search = Canvas(table, [stop])
    for canvas, state in enumerate(states):
        rows = slice(canvas * width, (canvas + 1) * width)
        given = budget, numbers[-1][canvas]
        path = search.best_path(logits[rows].cpu().numpy(), state, *given)
        if found.tokens[rows].tolist() != path.tokens.tolist():
            raise Wrong("the best path differs")
        is_out = torch.from_numpy(np.stack(search.forbidden(path, *given)))
        expected = logits[rows].cpu().masked_fill(is_out, -torch.inf)
        if not torch.equal(masked[rows].cpu(), expected):
            raise Wrong("rows are masked wrongly")


def _rows(device: torch.device, count: int = NUM_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, temperatures and keys."""
    zero = torch.tensor([0])
    keys = row_keys(zero, zero, zero, count, STREAM_GUMBEL)[0].contiguous()
    temperature = torch.linspace(0.3, 1.5, count)
    return (3 * _random(count, VOCAB)).to(device), temperature.to(device), keys.to(device)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
