"""Launch plans, the tile table, and the refusal of inconsistent inputs; none of it needs Triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.attention.cases import make_case
from dllm.attention.inputs import Layer, check_inputs
from dllm.attention.masks import Mask, QuerySpan, visible_range
from dllm.attention.planning import BatchShape, ceil_div, num_splits, plan_attention, visible_keys
from dllm.attention.tuning import HOPPER, OTHERS, TARGET_PROGRAMS, tile_config
from tests.support.multiprocessor import SHARED_KIB
from tests.support.process import run_python

# Full-attention layers of the 26B model: 16 heads of size 512 over 2 KV heads.
FULL_LAYER = BatchShape(
    num_tokens=256, num_seqs=1, num_heads=16, num_kv_heads=2, head_size=512,
    max_query_len=256, max_seq_len=131072,
)  # fmt: skip
SLIDING_LAYER = dataclasses.replace(FULL_LAYER, num_kv_heads=8, head_size=256)


def test_one_request_with_a_long_context_fills_the_chip() -> None:
    config = tile_config(512, 2)
    plan = plan_attention(FULL_LAYER, config, None)
    assert plan.is_split
    parts = num_splits(256, 100_000, FULL_LAYER, config, None)
    programs = 256 * 8 // plan.block_m * 2 * plan.value_blocks * parts
    assert programs == TARGET_PROGRAMS
    assert plan.split_programs >= parts


def test_a_sliding_layer_of_one_request_is_split_in_two() -> None:
    config, window = tile_config(256, 2), 1024
    plan = plan_attention(SLIDING_LAYER, config, window)
    unsplit = 256 * 2 // config.block_m * 8
    assert (plan.split_programs, unsplit * plan.split_programs) == (2, 64)
    assert num_splits(256, 600, SLIDING_LAYER, config, window) == 1
    # A long chunk of a prompt has programs enough.
    assert num_splits(4096, 100_000, SLIDING_LAYER, config, window) == 1


def test_a_large_batch_is_not_given_more_programs_but_the_same_parts() -> None:
    config = tile_config(512, 2)
    batch = dataclasses.replace(FULL_LAYER, num_tokens=32 * 256, num_seqs=32)
    plan = plan_attention(batch, config, None)
    assert plan.is_split
    assert plan.split_programs == 1
    alone = num_splits(256, 60_000, FULL_LAYER, config, None)
    assert num_splits(256, 60_000, batch, config, None) == alone


def test_tile_heights_follow_the_bound_and_not_the_batch() -> None:
    """With one bound for all steps of a server, a span is cut the same in any batch."""
    config = tile_config(256, 2)
    shapes = [
        dataclasses.replace(SLIDING_LAYER, num_tokens=tokens, num_seqs=seqs, max_query_len=2048)
        for tokens, seqs in ((8, 1), (256, 1), (512, 2), (2048, 5))
    ]
    assert {plan_attention(shape, config, None).block_m for shape in shapes} == {config.block_m}


def test_a_long_prefill_is_not_split_and_takes_little_workspace() -> None:
    config = tile_config(512, 2)
    prefill = dataclasses.replace(FULL_LAYER, num_tokens=8192, max_query_len=8192)
    assert num_splits(8192, 100_000, prefill, config, None) == 1
    plan = plan_attention(prefill, config, None)
    assert plan.partial_rows_per_seq * prefill.num_seqs == plan.num_partial_rows < 8192
    assert plan.workspace_elements(prefill) * 4 < 150e6


SHAPES = st.builds(
    lambda q, extra, seqs, kv, group, size, length: BatchShape(
        num_tokens=q + extra, num_seqs=seqs, num_heads=kv * group, num_kv_heads=kv,
        head_size=size, max_query_len=q, max_seq_len=length,
    ),
    st.integers(1, 600), st.integers(0, 600), st.integers(1, 40), st.sampled_from([1, 2, 8]),
    st.integers(1, 9), st.sampled_from([32, 80, 256, 512]), st.integers(1, 200_000),
)  # fmt: skip


@settings(max_examples=200)
@given(shape=SHAPES, data=st.data())
def test_the_plan_bounds_what_the_device_decides(shape: BatchShape, data: st.DataObject) -> None:
    """Whatever lengths turn up within the bounds, grid and workspace have room for them."""
    window = data.draw(st.none() | st.integers(1, 5000))
    config = tile_config(shape.head_size, data.draw(st.sampled_from([2, 4])))
    plan = plan_attention(shape, config, window)
    left, tiles = shape.num_tokens, 0
    for _ in range(shape.num_seqs):
        query_len = data.draw(st.integers(0, min(left, shape.max_query_len)))
        left -= query_len
        tiles += ceil_div(query_len * shape.group, plan.block_m)
        seq_len = data.draw(st.integers(0, shape.max_seq_len))
        parts = num_splits(query_len, seq_len, shape, config, window)
        assert parts <= plan.max_splits
        if parts > 1 and plan.partial_rows_per_seq:
            assert query_len <= plan.partial_rows_per_seq
    assert tiles <= plan.num_row_tiles


@settings(max_examples=200)
@given(shape=SHAPES, data=st.data())
def test_no_step_needs_more_workspace_than_the_largest(
    shape: BatchShape, data: st.DataObject
) -> None:
    window = data.draw(st.none() | st.integers(1, 5000))
    config = tile_config(shape.head_size, 2)
    step = dataclasses.replace(
        shape,
        num_tokens=data.draw(st.integers(1, shape.num_tokens)),
        num_seqs=data.draw(st.integers(1, shape.num_seqs)),
        max_seq_len=data.draw(st.integers(1, shape.max_seq_len)),
    )
    needed, largest = (
        plan_attention(one, config, window).workspace_elements(one) for one in (step, shape)
    )
    assert needed <= largest


@settings(max_examples=100)
@given(
    query_len=st.integers(1, 20), context=st.integers(0, 60), is_causal=st.booleans(),
    size=st.integers(1, 50),
)  # fmt: skip
def test_visible_keys_covers_every_row(
    query_len: int, context: int, is_causal: bool, size: int
) -> None:
    span = QuerySpan(query_len, query_len + context, is_causal)
    count = visible_keys(query_len, span.seq_len, size)
    for is_anchored in (False, True):
        mask = Mask(size, is_anchored)
        first = min(visible_range(row, span, mask)[0] for row in range(query_len))
        assert span.seq_len - count <= first


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_the_table_is_complete_and_fits(arch: int) -> None:
    limit = SHARED_KIB[arch] << 10
    for size in (16, 32, 64, 128, 256, 512):
        for element in (2, 4):
            config = tile_config(size, element, arch)
            loads = config.num_stages if arch in (90, 100) else max(config.num_stages - 1, 1)
            shared = config.block_m * size + loads * config.block_n * (size + config.columns(size))
            assert shared * element <= limit, (size, element)
            accumulator = config.block_m * config.columns(size) / (32 * config.num_warps)
            assert accumulator <= 128, (size, element)
    assert tile_config(320, 2) == HOPPER[512, 2]
    assert tile_config(80, 2, 86) == OTHERS[128, 2]


CASE = make_case(Layer(), ((3, 5, 0), (4, 9, 0)))
SCALE = torch.ones(1)


@pytest.mark.parametrize(
    ("pattern", "owner", "change"),
    [
        (r"out is \[6, 4, 32\] .* expected \[7, 4, 32\]", "out", CASE.query[:6]),
        ("out is .* torch.float16 .*torch.float32", "out", CASE.query.half()),
        (r"query is .* expected \[None, None, 16\]", "cache", {"both": torch.ones(2, 16, 2, 16)}),
        ("key cache is .* head size of 16", "cache", {"both": torch.ones(2, 16, 2, 8)}),
        ("value cache is", "cache", {"value": torch.ones(1, 16, 2, 32)}),
        (
            "value cache is .* a last stride of 1",
            "cache",
            {"value": torch.ones(2, 16, 2, 64)[..., ::2]},
        ),
        ("value cache is .* torch.float16", "cache", {"value": CASE.cache.value.half()}),
        ("4 query heads .* of 3 KV heads", "cache", {"both": torch.zeros(2, 16, 3, 32)}),
        ("query is .* torch.float32 .*float16", "cache", {"both": CASE.cache.key.half()}),
        (r"k_scale is \[2\]", "cache", {"k_scale": torch.ones(2)}),
        (r"k_scale is \[1\] torch.float16", "cache", {"k_scale": SCALE.half()}),
        ("v_scale is .* on meta", "cache", {"v_scale": SCALE.to("meta")}),
        (r"query_start_loc is \[2\] .* expected \[3\]", "batch", {"query_start_loc": [0, 3]}),
        ("seq_lens is .* torch.int64", "batch", {"seq_lens": CASE.batch.seq_lens.long()}),
        ("seq_lens is .* on meta", "batch", {"seq_lens": CASE.batch.seq_lens.to("meta")}),
        ("is_causal is .* torch.bool", "batch", {"is_causal": CASE.batch.is_causal.bool()}),
        ("is_causal is .* expected", "batch", {"is_causal": [0]}),
        ("first_keys is .* expected", "batch", {"first_keys": [0]}),
        (r"block_tables is \[1, 2\]", "batch", {"block_tables": CASE.batch.block_tables[:1]}),
        ("block_tables is .*int64", "batch", {"block_tables": CASE.batch.block_tables.long()}),
        ("max_query_len is 0", "batch", {"max_query_len": 0}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(pattern: str, owner: str, change: Any) -> None:
    parts: dict[str, Any] = {"cache": CASE.cache, "batch": CASE.batch, "out": CASE.poisoned_out()}
    check_inputs(CASE.query, **parts)
    if isinstance(change, dict):
        lists = {k: torch.tensor(v).int() for k, v in change.items() if isinstance(v, list)}
        change = change | lists
        if "both" in change:
            change = dict.fromkeys(("key", "value"), change["both"])
    with pytest.raises(ValueError, match=pattern):
        if isinstance(change, dict):
            change = dataclasses.replace(parts[owner], **change)
        check_inputs(CASE.query, **(parts | {owner: change}))


def test_the_specification_can_be_read_without_triton_and_vllm() -> None:
    code = (
        "import sys, dllm.attention.masks, dllm.attention.inputs\n"
        "import dllm.attention.reference, dllm.attention.planning\n"
        "assert not {'triton', 'vllm'} & set(sys.modules), 'imported'"
    )
    run_python("-c", code)
