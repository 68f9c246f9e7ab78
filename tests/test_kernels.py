"""Every Triton kernel of the project through the real compiler and assembler, without a GPU.

Launched as a server does it, with the shapes of the released models (`support/kernel_launches`).
The interpreter accepts programs that the compiler refuses, and says nothing about registers. With
another Triton: `make kernels TRITON=3.6.0`.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from bench.multiprocessor import SHARED_KIB, programs_of_sm
from tests.support.process import run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
COMPILED = {"TRITON_INTERPRET": None}
GROUPS = ("sliding", "full", "drafter", "sampling")
MATRIX = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
# Bytes of a thread that may be spilled: keys that become bf16 need registers.
MAY_SPILL = {"fp8 cache": 512}


def compiled(arch: int, group: str) -> list[dict[str, Any]]:
    """What became of each kernel of a group, in the order of the launches."""
    worker = ("-m", "tests.support.kernel_launches", "compile", str(arch), group)
    result = run_python(*worker, environment=COMPILED, timeout=900)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("arch", SHARED_KIB)
def test_kernels_fit_every_gpu(arch: int, group: str) -> None:
    found = compiled(arch, group)
    assert found
    for one in found:
        where = (arch, one["label"], one["kernel"], one)
        used = one["registers"], one["shared"], one["num_warps"]
        assert programs_of_sm(arch, *used) >= 1, where
        allowed = 128 if (arch, one["label"]) == (100, "full") else 0
        assert one["spilled"] <= MAY_SPILL.get(one["label"], allowed), where
        if one["kernel"] == "canvas_attention_kernel":
            assert one["matrix"] == MATRIX[arch], where
            # While a tile of keys is computed with, K and V of the next one are under way.
            assert min(one["waits"]) >= 2, where
        if one["kernel"] == "_search_kernel":
            # What one thread writes for a position, others read for the next.
            assert one["barriers"] >= 2, where


@pytest.mark.slow
def test_every_branch_of_the_attention_kernel_compiles() -> None:
    found = compiled(90, "branches")
    assert [one["kernel"] for one in found].count("canvas_attention_kernel") == 3
    assert all(one["matrix"] for one in found if one["kernel"] == "canvas_attention_kernel")


def test_batches_of_a_server_need_few_compiled_kernels() -> None:
    """200 random batches, whose numbers and lengths of sequences, tables and slices differ."""
    worker = ("-m", "tests.support.kernel_launches", "variants", "200")
    counts = json.loads(run_python(*worker, environment=COMPILED).stdout)
    assert counts == {
        "canvas_attention_kernel": 3,  # sliding and full layers, a drafter's
        "merge_splits_kernel": 3,
        "write_kv_kernel": 2,  # sliding and full layers
        "context_kv_kernel": 2,  # few tokens and many
        "_block_kernel": 2,  # with and without filters
        "_merge_kernel": 2,
        "_cutoff_kernel": 1,
        "_kept_tiles_kernel": 1,
        "_product_kernel": 1,
        "_chunk_kernel": 1,
        "_read_kernel": 1,
        "_search_kernel": 1,
        "_mask_kernel": 1,
    }
