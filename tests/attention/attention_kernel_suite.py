"""The attention kernels against the reference; tests/test_kernel_suites.py runs this.

The interpreter truncates to bf16 instead of rounding, which doubles the unit roundoff of `cases`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dllm.attention.canvas_attention as kernel_module
from dllm.attention.cache_write import check_write, write_kv
from dllm.attention.calls import MIXED as BOTH_KINDS
from dllm.attention.calls import calls_of
from dllm.attention.canvas_attention import batch_shape, canvas_attention, launch
from dllm.attention.cases import CAUSAL, IMAGE, Case, make_batch, make_case
from dllm.attention.choice import CAUSAL as CAUSAL_ROWS
from dllm.attention.inputs import Layer, PagedKV, check_inputs
from dllm.attention.masks import ALL, Mask, QuerySpan, visible_range
from dllm.attention.planning import AttentionPlan, num_splits, plan_attention, visible_keys
from dllm.attention.reference import paged_attention
from dllm.attention.tuning import TileConfig
from dllm.attention.visible_pages import VisiblePages
from tests.support.interpreter import DEVICE, UNIT_ROUNDOFF, speed_up

speed_up()
TINY = TileConfig(16, 32, 4, 1, min_keys_per_split=32, max_splits=3, min_keys_in_window=32)
UNSPLIT = dataclasses.replace(TINY, max_splits=1)
# Causal, denoise, fused; a single row; a head of one row; odd lengths; a canvas that starts cold;
# an image.
MIXED = (
    (5, 20, CAUSAL), (7, 33, 0), (9, 0, 4), (1, 70, CAUSAL), (3, 90, 1), (6, 0, 0), (9, 40, IMAGE),
)  # fmt: skip
# With blocks: a prompt in two chunks, the second of which ends within a block; a canvas; an emitted
# block with the next canvas; a commit alone; a context that ends within a block.
BLOCKS = (
    (64, 0, CAUSAL), (41, 64, CAUSAL), (32, 96, 0), (64, 96, 32), (32, 32, CAUSAL),
    (7, 89, CAUSAL), (1, 96, CAUSAL),
)  # fmt: skip
MASKS = [ALL, Mask(8), Mask(8, is_anchored=True)]


OF_BATCH = ("padding_tokens", "padding_seqs", "logit_softcap", "seed")


def case_of(spans: Any, *heads: int, **sizes: Any) -> Case:
    """A `Case` on the device of this suite; the arguments are those of `Layer` and `make_case`."""
    of_batch = {name: sizes.pop(name) for name in OF_BATCH if name in sizes}
    return make_case(Layer(*heads, **sizes), spans, **of_batch, device=DEVICE)


def plan_of(case: Case, config: TileConfig | None = TINY) -> AttentionPlan:
    """The plan with these tiles; None: those of the table."""
    shape = batch_shape(case.query, case.cache, case.batch)
    if config is None:
        return kernel_module.plan_of(shape, case.query, case.options, case.cache.is_fp8)
    return plan_attention(shape, config, case.options.mask.window)


def launched(case: Case, plan: AttentionPlan, filling: float = float("nan")) -> torch.Tensor:
    """The output over NaN, with a workspace full of ``filling``."""
    size = plan.workspace_elements(batch_shape(case.query, case.cache, case.batch))
    workspace = torch.full((size,), filling, device=case.query.device)
    out = case.poisoned_out()
    launch(case.query, case.cache, case.batch, case.options, out, plan, workspace)
    if any(parts > 1 for parts in splits(case, plan)):
        assert not workspace.isnan().all(), "no part was written: nothing was split"
    return out


def run(case: Case, config: TileConfig | None = TINY) -> tuple[torch.Tensor, AttentionPlan]:
    """The output over NaN, and the plan; None: as a server calls the kernel."""
    plan = plan_of(case, config)
    out = case.poisoned_out()
    check_inputs(case.query, case.cache, case.batch, out)
    if config is not None:
        return launched(case, plan), plan
    canvas_attention(case.query, case.cache, case.batch, case.options, out)
    return out, plan


def splits(case: Case, plan: AttentionPlan) -> list[int]:
    """Into how many parts each sequence with rows is cut."""
    shape = batch_shape(case.query, case.cache, case.batch)
    return [
        num_splits(span.query_len, span.seq_len, shape, plan.config, case.options.mask.window)
        for span in case.spans
        if span.query_len > 0
    ]


def sees_nothing(span: QuerySpan, parts: int, mask: Mask) -> bool:
    """Whether some row tile (16 pairs, groups of 2) sees no key of some part of a span.

    Parts are multiples of 32 keys long, from the first visible key on, rounded down to 32.
    """
    first = (span.seq_len - visible_keys(span.query_len, span.seq_len, mask.window)) // 32 * 32
    part_len = -(-(span.seq_len - first) // parts // 32) * 32
    cuts = [first + part * part_len for part in range(parts)]
    return parts > 1 and any(
        high <= cut or low >= cut + part_len
        for _, low, high in tiles_of_rows(span, mask)
        for cut in cuts
    )


def check(case: Case, out: torch.Tensor) -> None:
    case.check(out, UNIT_ROUNDOFF[case.query.dtype])


def rows_of(case: Case, out: torch.Tensor, index: int) -> torch.Tensor:
    """The output rows of one sequence."""
    start = sum(span.query_len for span in case.spans[:index])
    return out[start : start + case.spans[index].query_len]


DTYPES = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_every_dtype_and_row_kind(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, mask: Mask
) -> None:
    dtypes = dict(dtype=dtype, cache_dtype=cache_dtype)
    case = case_of(MIXED, mask=mask, padding_tokens=3, padding_seqs=2, **dtypes)
    out, plan = run(case)
    assert plan.is_split == (mask.window is None)
    assert (max(splits(case, plan)) > 1) == (mask.window is None)
    check(case, out)


# What is computed where, by its name: spans, and what of the sizes is unusual.
WINDOWED = ((15, 60, CAUSAL), (15, 26, 0), (15, 25, 7), (15, 10, 0), (40, 0, 0), (15, 2, 4))
SPLIT = ((7, 70, 0), (9, 90, 5), (5, 80, CAUSAL))
SHAPES: dict[str, tuple[Any, dict[str, Any], TileConfig | None]] = {
    **{f"window of {size}": (WINDOWED, dict(mask=Mask(size)), TINY) for size in (1, 2, 6, 26)},
    **{
        f"anchored window of {size}": (WINDOWED, dict(mask=Mask(size, is_anchored=True)), TINY)
        for size in (1, 2, 6, 26)
    },
    # Below, equal to and above the tile of 32 keys; dividing it or not; canvases cross pages.
    **{
        f"pages of {size}": (((20, 55, 0), (33, 14, 20), (1, 0, 0)), dict(page_size=size), TINY)
        for size in (5, 32, 48, 64)
    },
    **{
        f"{heads} heads over {kv}": (MIXED, dict(num_heads=heads, num_kv_heads=kv), UNSPLIT)
        for heads, kv in ((1, 1), (3, 1), (14, 2), (4, 4))
    },
    **{
        f"soft cap, {mask}": (MIXED, dict(logit_softcap=1.5, mask=mask), UNSPLIT) for mask in MASKS
    },
    "columns shared by programs": (
        MIXED, dict(head_size=40), dataclasses.replace(TINY, block_v=16)
    ),
    **{
        f"split window, {dtype}, {cache}": (
            SPLIT, dict(dtype=dtype, cache_dtype=cache, mask=Mask(40, is_anchored=True)), TINY
        )
        for dtype, cache in DTYPES
    },
    "blocks, the table's tiles": (
        BLOCKS,
        dict(num_heads=8, head_size=128, mask=Mask(block_length=32), dtype=torch.bfloat16),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    spans, sizes, config = SHAPES[name]
    case = case_of(spans, **sizes)
    check(case, run(case, config)[0])


@pytest.mark.parametrize("is_anchored", [False, True])
@pytest.mark.parametrize(("size", "page_size"), [(37, 7), (65, 64), (100, 16)])
def test_windows_that_are_split(is_anchored: bool, size: int, page_size: int) -> None:
    """Odd windows and lengths; pages smaller than, equal to and larger than a part.

    Some rows see nothing of some parts: the first rows of a causal head end before the last part,
    and the last rows of a canvas begin behind the first one.
    """
    mask = Mask(size, is_anchored)
    spans = ((33, 61, 0), (30, 150, CAUSAL), (21, 43, 13), (1, 95, 0), (9, 0, 0))
    sizes = dict(page_size=page_size, padding_tokens=2, padding_seqs=1)
    case = case_of(spans, num_kv_heads=1, num_heads=2, mask=mask, **sizes)
    out, plan = run(case)
    parts = splits(case, plan)
    assert max(parts) == min(3, -(-(size + 32) // 32))
    assert any(sees_nothing(*each, mask) for each in zip(case.spans, parts, strict=True))
    check(case, out)
    whole, _ = run(case, UNSPLIT)
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "block_length"),
    [*((*dtypes, 32) for dtypes in DTYPES), *((*DTYPES[0], size) for size in (2, 4, 5, 64))],
    ids=str,
)
def test_blocks(dtype: torch.dtype, cache_dtype: torch.dtype | None, block_length: int) -> None:
    """Heads that see their own block: of every kind, also where blocks and pages do not match."""
    sizes = dict(mask=Mask(block_length=block_length), padding_tokens=3, padding_seqs=2)
    case = case_of((*BLOCKS, *MIXED), 2, 1, dtype=dtype, cache_dtype=cache_dtype, **sizes)
    out, plan = run(case)
    assert max(splits(case, plan)) > 1
    check(case, out)


def tiles_of_rows(span: QuerySpan, mask: Mask) -> list[tuple[range, int, int]]:
    """Rows of each row tile (16 pairs, groups of 2), and from the specification the first and
    last-plus-one key that any of them sees."""
    tiles = []
    for first in range(0, span.query_len, 8):
        rows = range(first, min(first + 8, span.query_len))
        bounds = [visible_range(row, span, mask) for row in rows]
        tiles.append((rows, min(low for low, _ in bounds), max(high for _, high in bounds)))
    return tiles


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls in the interpreter")
@pytest.mark.parametrize(
    "mask",
    [ALL, Mask(block_length=4), Mask(block_length=32), Mask(70), Mask(70, is_anchored=True)],
    ids=repr,
)
def test_only_visible_tiles_are_taken_and_only_edges_masked(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the tiles of 32 keys that each row tile takes, without and with a mask."""
    taken = []
    attend = kernel_module.attend

    def spy(*args: Any, **constants: Any) -> Any:
        taken.append((constants["MASKED"], int(args[6])))
        return attend(*args, **constants)

    monkeypatch.setattr(kernel_module, "attend", spy)
    spans = ((20, 110, CAUSAL), (20, 110, 0), (20, 110, 9), (20, 110, IMAGE))
    case = case_of(spans, 4, 2, head_size=16, mask=mask)
    _, plan = run(case, UNSPLIT)
    assert (plan.block_m, plan.config.block_n) == (16, 32)
    expected = []
    for span in case.spans:
        for rows, low, high in tiles_of_rows(span, mask):
            bounds = [visible_range(row, span, mask) for row in rows]
            whole = max(0, min(b[1] for b in bounds) // 32 - -(-max(b[0] for b in bounds) // 32))
            expected += [(False, whole), (True, -(-high // 32) - low // 32 - whole)]
    assert sorted(taken) == sorted(2 * expected)  # two KV heads
    assert sum(count for is_masked, count in expected if not is_masked) > 0


@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_head_sizes_with_the_committed_tiles(head_size: int, dtype: torch.dtype) -> None:
    spans = ((20, 130, 0), (9, 5, CAUSAL), (12, 100, 6))
    mask = Mask(64, is_anchored=True) if head_size == 256 else ALL
    case = case_of(spans, head_size=head_size, dtype=dtype, mask=mask)
    out, plan = run(case, config=None)
    assert plan.value_blocks == (2 if head_size == 512 else 1)
    check(case, out)


def test_a_sequence_longer_than_the_host_believes_writes_nowhere_else() -> None:
    """With this bound no sequence is split, and there is no workspace."""
    case = case_of(((5, 120, 0), (4, 90, CAUSAL)))
    short = dataclasses.replace(case, batch=dataclasses.replace(case.batch, max_seq_len=32))
    plan = plan_of(short)
    assert not plan.is_split and min(splits(case, plan_of(case))) > 1
    memory, out = torch.full((1 << 16,), 7.0, device=DEVICE), case.poisoned_out()
    launch(short.query, short.cache, short.batch, short.options, out, plan, memory)
    assert (memory == 7).all()
    check(case, out)


def test_who_computes_the_parts_does_not_change_a_bit() -> None:
    """One program for all parts or one for each; workspace by token or by sequence."""
    case = case_of(MIXED)
    shape = batch_shape(case.query, case.cache, case.batch)
    plan = plan_of(case)
    assert (plan.split_programs, plan.partial_rows_per_seq) == (plan.max_splits, 0)
    outputs = []
    for programs, rows_per_seq in ((plan.max_splits, 0), (1, 0), (2, 16), (1, 16)):
        rows = shape.num_seqs * rows_per_seq or shape.num_tokens
        other = dataclasses.replace(
            plan,
            split_programs=programs,
            partial_rows_per_seq=rows_per_seq,
            num_partial_rows=rows,
        )
        outputs.append(launched(case, other))
    check(case, outputs[0])
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("mask", [ALL, Mask(40, is_anchored=True), Mask(90)], ids=str)
def test_a_sequence_gives_the_same_bits_alone_and_in_any_batch(mask: Mask) -> None:
    case = case_of(MIXED, 2, 1, mask=mask, padding_tokens=5, padding_seqs=3)
    together, _ = run(case)
    again, _ = run(case)
    assert torch.equal(together.nan_to_num(7), again.nan_to_num(7)), "not deterministic"
    for index, span in enumerate(case.spans):
        tables = case.batch.block_tables[index : index + 1]
        batch = dataclasses.replace(
            make_batch([span], tables, mask, device=DEVICE), max_query_len=case.batch.max_query_len
        )
        start = sum(s.query_len for s in case.spans[:index])
        alone = dataclasses.replace(
            case, query=case.query[start : start + span.query_len], batch=batch, spans=[span]
        )
        assert torch.equal(run(alone)[0], rows_of(case, together, index))


def test_a_drafter_that_shortens_seq_len() -> None:
    """Bidirectional rows see the shorter sequence; causal rows at negative positions nothing."""
    spans = ((16, 30, 0), (16, -5, 0), (16, -13, 0), (8, -3, CAUSAL))
    case = case_of(spans, num_heads=8, num_kv_heads=2)
    out, _ = run(case)
    check(case, out)
    assert (rows_of(case, out, 3)[:3] == 0).all()


@pytest.mark.parametrize("num_rows", [2, 3, 8, 32])
def test_drafter_shapes(num_rows: int) -> None:
    """A few rows over long contexts of different lengths, with the committed tiles."""
    spans = ((num_rows, 1100, 0), (num_rows, 3, 0), (num_rows, 0, 0), (num_rows, 257, 0))
    case = case_of(spans, 8, 2, head_size=128, dtype=torch.bfloat16)
    out, plan = run(case, config=None)
    assert plan.block_m == max(16, num_rows * 4)
    assert splits(case, plan)[0] == 2
    check(case, out)


def test_padding_tokens_after_a_sequence_that_is_split() -> None:
    case = case_of(((3, 5, 0), (4, 90, 0)), padding_tokens=3)
    out, plan = run(case)
    assert splits(case, plan) == [1, 3]
    check(case, out)
    # Once more over zeros: merging NaN into the padding would look like leaving it alone.
    check(case, launched(case, plan, filling=0.0))


def test_empty_batches() -> None:
    """No sequence; only padded ones; tokens that belong to padding."""
    case = case_of((), padding_seqs=2, padding_tokens=4)
    check(case, run(case)[0])
    nothing = case_of(())
    check(nothing, run(nothing)[0])
    padded = case_of(((4, -4, 0), (3, 5, 0)))
    check(padded, run(padded)[0])


@pytest.mark.parametrize("layout", ["interleaved", "vllm"])
def test_cache_layouts(layout: str) -> None:
    """[pages, 2, ...], and vLLM 0.32's [pages, heads, slots, K and V]."""
    case = case_of(MIXED)
    key, value = case.cache.key, case.cache.value
    if layout == "interleaved":
        both = torch.stack((key, value), dim=1)
        key, value = both[:, 0], both[:, 1]
    else:
        both = torch.cat((key, value), dim=-1).transpose(1, 2).contiguous()
        key, value = both.transpose(1, 2).split(key.shape[-1], dim=-1)
    assert key.stride() != case.cache.key.stride()
    moved = dataclasses.replace(case, cache=PagedKV(key, value))
    assert torch.equal(run(moved, UNSPLIT)[0], run(case, UNSPLIT)[0])


def test_a_query_that_is_a_view_of_a_fused_projection() -> None:
    case = case_of(MIXED)
    fused = torch.cat((case.query, torch.full_like(case.query, float("nan"))), dim=1)
    view = fused[:, : case.query.shape[1]]
    check(case, run(dataclasses.replace(case, query=view), UNSPLIT)[0])


SPAN = st.tuples(st.integers(0, 20), st.integers(0, 90), st.integers(-1, 21))
SOME_MASK = st.builds(Mask, st.integers(1, 100), st.booleans()) | st.builds(
    Mask, block_length=st.sampled_from([1, 3, 4, 32])
)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    spans=st.lists(SPAN, min_size=1, max_size=4),
    mask=SOME_MASK,
    head_size=st.sampled_from([16, 24, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    page_size=st.sampled_from([4, 7, 16, 32]),
    config=st.sampled_from([TINY, UNSPLIT, TileConfig(64, 16, 4, 1, 32, 3, block_v=16)]),
    seed=st.integers(0, 9),
)
def test_random_batches(
    spans: list[tuple[int, int, int]], mask: Mask, head_size: int,
    heads: tuple[int, int], page_size: int, config: TileConfig, seed: int,
) -> None:  # fmt: skip
    case = case_of(
        spans, *heads, head_size, mask, page_size=page_size, seed=seed,
        padding_tokens=seed % 3, padding_seqs=seed % 2,
    )  # fmt: skip
    check(case, run(case, config)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_cache_write_fills_its_slots_and_no_other(
    dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    num_pages, page_size, heads, head_size = 6, 5, 3, 24
    both = torch.full((num_pages, 2, page_size, heads, head_size), float("nan"), dtype=dtype)
    both = both.to(DEVICE)
    cache = PagedKV(both[:, 0], both[:, 1])
    slots = torch.tensor([7, -1, 0, 29, -1, 14], dtype=index_dtype, device=DEVICE)
    key = torch.randn(8, heads, head_size).to(dtype).to(DEVICE)
    value = torch.randn(8, heads, head_size).to(dtype).to(DEVICE)
    write_kv(key, value, cache, slots)
    for stored, given_rows in ((cache.key, key), (cache.value, value)):
        flat = stored.reshape(num_pages * page_size, heads, head_size)
        kept = [slot for slot in slots.tolist() if slot >= 0]
        rows = [i for i, slot in enumerate(slots.tolist()) if slot >= 0]
        assert torch.equal(flat[kept], given_rows[rows])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[kept] = False
        assert flat[untouched.to(flat.device)].isnan().all()


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_cache_write_quantizes_and_saturates(fp8: torch.dtype) -> None:
    largest = torch.finfo(fp8).max
    if DEVICE == "cuda":
        key = torch.randn(4, 2, 32)
    else:  # numbers that fp8 holds exactly: the interpreter does not round to nearest even
        key = torch.randint(-7, 8, (4, 2, 32)) / 4
    key[0, 0, :3] = torch.tensor([3 * largest, -3 * largest, float("inf")])
    key = key.to(DEVICE)
    scale = torch.tensor([0.5], device=DEVICE)
    empty = torch.zeros(2, 4, 2, 32, dtype=fp8, device=DEVICE)
    cache = PagedKV(empty.clone(), empty.clone(), k_scale=scale, v_scale=None)
    write_kv(key, key, cache, torch.tensor([4, 2, -1, 7], device=DEVICE))
    for stored, factor in ((cache.key, 0.5), (cache.value, 1.0)):
        flat = stored.float().reshape(8, 2, 32)
        wanted = (key[[0, 1, 3]] / factor).clamp(-largest, largest).to(fp8).float()
        assert torch.equal(flat[[4, 2, 7]], wanted)
        assert (flat[[0, 1, 3, 5, 6]] == 0).all()


def test_cache_write_refuses_tensors_that_do_not_fit() -> None:
    cache = PagedKV(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16))
    with pytest.raises(ValueError, match=r"key is \[1, 1, 32\].*\[None, 1, 16\]"):
        check_write(torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="slot_mapping has 2 slots for 1 tokens"):
        check_write(torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), cache, torch.tensor([0, 1]))


# --- what FlashAttention gets ---------------------------------------------------------------------


def paged_reference(case: Case, batch: Any) -> torch.Tensor:
    """The definition, for the sequences of a batch over the case's query and cache."""
    lens, flags = batch.seq_lens.tolist(), batch.is_causal.tolist()
    rows = batch.query_start_loc.diff().tolist()
    spans = [QuerySpan(*of, bool(flag)) for *of, flag in zip(rows, lens, flags, strict=True)]
    given = case.query, case.cache.key, case.cache.value, batch.block_tables, spans, case.options
    found = torch.cat(paged_attention(*given)).to(case.query.dtype)
    return torch.cat([found, case.query[len(found) :]])  # padding


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("size", [1, 8, 40])
def test_a_sequence_without_pages_in_front_of_its_window_is_the_same(
    size: int, page_size: int
) -> None:
    """Causal sequences, canvases, an image, padding."""
    mask = Mask(size)
    case = case_of(MIXED, mask=mask, page_size=page_size, padding_seqs=1)
    batch = dataclasses.replace(case.batch, max_seq_len=int(case.batch.seq_lens.max()))
    num_seqs = batch.num_seqs
    sizes = size, page_size, num_seqs, batch.max_query_len
    shorten = VisiblePages(*sizes, torch.device(DEVICE))
    found = shorten(batch)
    for seq, span in enumerate(case.spans):
        start, _ = visible_range(0, dataclasses.replace(span, is_causal=False), mask)
        hidden = start // page_size
        left = span.seq_len - hidden * page_size
        assert found.seq_lens[seq] == left <= found.max_seq_len
        used = -(-left // page_size)
        expected = batch.block_tables[seq, hidden : hidden + used]
        assert torch.equal(found.block_tables[seq, :used], expected)
    assert found.seq_lens[-1] == 0
    check(case, paged_reference(case, found))

    again = shorten(batch)  # a graph reads the same memory
    assert again.block_tables.data_ptr() == found.block_tables.data_ptr()
    assert again.seq_lens.data_ptr() == found.seq_lens.data_ptr()
    few = VisiblePages(size, page_size, 2, batch.max_query_len, torch.device(DEVICE))
    assert torch.equal(few(batch).seq_lens, found.seq_lens)
    assert torch.equal(few(batch).block_tables, found.block_tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_calls_serve_an_anchored_layer(dtype: torch.dtype) -> None:
    """The first writes all rows, but reads one key of a canvas; the second leaves causal rows."""
    mask = Mask(8, is_anchored=True)
    case = case_of(MIXED, mask=mask, dtype=dtype, padding_seqs=1)
    asked = case.batch, BOTH_KINDS, [CAUSAL_ROWS], case.batch.max_query_len
    flash, own = calls_of(*asked)
    assert (flash.is_flash, own.is_flash) == (True, False)
    is_canvas = case.batch.is_causal == 0
    assert (flash.batch.seq_lens[is_canvas] == 1).all() and flash.batch.max_ahead == 0
    assert flash.batch.first_keys is None
    assert (own.batch.seq_lens[~is_canvas] == 0).all()
    cached = dataclasses.replace(
        case, cache=PagedKV(case.cache.key.nan_to_num(9.0), case.cache.value.nan_to_num(9.0))
    )
    tables = flash.batch.block_tables.clamp(min=0)  # of freed pages
    out = paged_reference(cached, dataclasses.replace(flash.batch, block_tables=tables))
    canvas_attention(case.query, case.cache, own.batch, case.options, out)
    check(case, out)

    blocks = dataclasses.replace(case.batch, max_ahead=case.batch.max_query_len - 1)
    (call,) = calls_of(blocks, *asked[1:])  # no causal sequence is longer than the canvases
    assert not call.is_flash and call.batch is blocks
