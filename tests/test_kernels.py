"""Every Triton kernel of the project through the real compiler and assembler, without a GPU.

Launched as a server does it, with the shapes of the released models (`support/kernel_launches`).
The interpreter accepts programs that the compiler refuses, and says nothing about registers. With
another Triton: `make kernels TRITON=3.6.0`.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from dllm.ops.row_stats import WIDE
from tests.support.multiprocessor import SHARED_KIB, programs_of_sm
from tests.support.process import printed_json, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]
ONE_OF_EACH_GROUP = {
    "canvas_attention_kernel",
    "context_kv_kernel",
    "_tile_kernel",
    "_product_kernel",
}
MATRIX = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
# On an H200, larger tiles without loads ahead are faster (bench/results/h200.txt).
WITHOUT_LOADS_AHEAD = {90: ("full",)}
LOW = {90: ("full, fp8 cache", "draft"), 100: ("full", "full, fp8 cache", "draft")}


@functools.cache
def report(arch: int) -> dict[str, Any]:
    """What ``kernel_launches`` prints for a GPU."""
    worker = ("-m", "tests.support.kernel_launches", str(arch))
    result = run_python(*worker, environment={"TRITON_INTERPRET": None})
    return dict(printed_json(result))


def compiled(arch: int, *, branches: bool) -> list[dict[str, Any]]:
    """Kernels in the order of the launches: those of the branches, or all others."""
    return [one for one in report(arch)["compiled"] if (one["group"] == "branches") is branches]


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_kernels_fit_every_gpu(arch: int) -> None:
    found = compiled(arch, branches=False)
    assert {one["kernel"] for one in found} >= ONE_OF_EACH_GROUP
    for one in found:
        where = (arch, one["label"], one["kernel"], one)
        used = one["registers"], one["shared"], one["num_warps"]
        assert programs_of_sm(arch, *used) >= 1, where
        assert one["spilled"] == 0, where
        if one["kernel"] == "canvas_attention_kernel":
            # Tiles of 32 rows, and those of few drafts, are too low for the larger instructions.
            is_low = one["label"] in LOW.get(arch, ())
            assert one["matrix"] == ("mma" if is_low else MATRIX[arch]), where
            if one["label"] not in WITHOUT_LOADS_AHEAD.get(arch, ()):
                # While a tile of keys is computed with, K and V of the next one are under way.
                assert min(one["waits"]) >= 2, where
        if one["kernel"] == "context_kv_kernel" and arch in (80, 90):
            # Hopper's instruction needs 64 rows.
            assert one["matrix"] == ("mma" if "few" in one["label"] else MATRIX[arch]), where
            assert one["waits"], where
        if one["label"] == "soft embeddings" and one["kernel"] == "_product_kernel":
            assert one["matrix"] == MATRIX[arch] and min(one["waits"]) >= 2, where
        if one["kernel"] == "_search_kernel":
            # What one thread writes for a position, others read for the next.
            assert one["barriers"] >= 2, where


@pytest.mark.parametrize("label", ["statistics", "raw"])
def test_few_instructions_are_spent_on_a_token(label: str) -> None:
    """Of the kernels that read all logits. A program of one warp has a tile: 32 tokens a thread."""
    (found,) = (
        one
        for one in compiled(90, branches=False)
        if one["kernel"] == "_tile_kernel" and one["label"] == label
    )
    assert found["num_warps"] == 1 and found["registers"] <= 72, found
    assert found["instructions"] / (WIDE / 32) <= 25, found


def test_every_branch_of_the_kernels_of_attention_compiles() -> None:
    found = compiled(90, branches=True)
    assert [one["kernel"] for one in found].count("canvas_attention_kernel") == 3
    assert all(one["spilled"] == 0 for one in found)
    contexts = [one["matrix"] for one in found if one["kernel"] == "context_kv_kernel"]
    assert contexts == ["wgmma", "wgmma", ""]  # fp32 has no matrix instruction
    assert all(one["matrix"] for one in found if one["kernel"] == "canvas_attention_kernel")


def test_batches_of_a_server_need_few_compiled_kernels() -> None:
    assert report(90)["variants"] == {
        "canvas_attention_kernel": 3,  # sliding and full layers, a drafter's
        "merge_splits_kernel": 3,
        "visible_pages_kernel": 1,
        "write_kv_kernel": 2,  # sliding and full layers
        "context_kv_kernel": 2,  # few tokens and many
        "_tile_kernel": 4,  # of raw logits and others, with and without filters
        "_row_kernel": 4,
        "_cutoff_kernel": 2,
        "_heavy_kernel": 2,
        "_product_kernel": 1,
        "_chunk_kernel": 2,  # tokens of classes, classes of labels
        "_read_kernel": 1,
        "_search_kernel": 1,
        "_mask_kernel": 1,
    }
