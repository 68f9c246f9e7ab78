"""bench/kernel_table.py: the time of a pass is what further blocks took, kernel by kernel."""

import pytest
import torch

from bench.kernel_table import (
    ATTENTION,
    EXPERTS,
    NUM_SHOWN,
    PRODUCTS,
    REST,
    SAMPLER,
    class_of,
    kernel_times,
    shown,
    table_rows,
)


def test_prompts_cancel_and_shares_are_of_a_pass() -> None:
    one = {"prefill": 5.0, "gemm": 20.0, "softmax": 4.0}
    two = {"prefill": 4.9, "gemm": 36.0, "softmax": 8.0}
    rows = table_rows(one, two, passes=4)
    assert [(row["kernel"], row["ms"], row["share"]) for row in rows] == [
        ("gemm", 4.0, 0.8),
        ("softmax", 1.0, 0.2),
    ]
    assert "5.000 ms a pass" in shown(rows)
    many = table_rows({}, {f"k{i}": 1.0 for i in range(99)}, passes=1)
    assert len(shown(many).splitlines()) == NUM_SHOWN + 1


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("canvas_attention_kernel", ATTENTION),
        ("kernel_unified_attention_3d", ATTENTION),
        ("reduce_segments", ATTENTION),
        ("fused_moe_kernel", EXPERTS),
        ("void cutlass::device_kernel<GemmUniversal<GroupProblemShape<...", EXPERTS),
        ("nvjet_tst_128x256_64x4", PRODUCTS),
        ("void cutlass::device_kernel<enable_sm90<GemmUniversal", PRODUCTS),
        ("_block_kernel", SAMPLER),
        ("triton_poi_fused_add_0", REST),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind


def test_times_are_those_of_what_ran() -> None:
    x = torch.randn(256, 256)
    times = kernel_times(lambda: [x @ x for _ in range(20)])
    assert max(times, key=lambda name: times[name]) == "aten::mm"
