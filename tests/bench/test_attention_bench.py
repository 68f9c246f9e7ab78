"""The attention benchmark's plumbing: a smoke run, and that wrong results get no numbers."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention.tuning import HOPPER
from bench.attention import Result, reference, row_error, targets, tolerance
from bench.attention_shapes import (
    CANVAS,
    DRAFTER,
    FULL,
    SLIDING,
    Layer,
    Shape,
    make_inputs,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

# Runs the benchmark with a kernel that forgets the last row.
BROKEN = """
import sys
sys.argv = ["attention", "--smoke", "--out", sys.argv[1]]
import os
os.environ["TRITON_INTERPRET"] = "1"
import bench.attention as benchmark
honest = benchmark.prepare_ours
def broken(shape, inputs):
    run = honest(shape, inputs)
    def forgetful():
        out = run()
        out[-1] = 0
        return out
    return forgetful
benchmark.prepare_ours = broken
sys.exit(benchmark.main())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@needs_triton
def test_smoke_run_writes_csv_and_plot(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    source = Path(vllm.origin).parent.parent
    command = ("-m", "bench.attention", "--smoke", "--commit", "abc", "--out", str(out))
    result = run(*command, "--vllm-source", str(source))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = list(csv.DictReader(out.open()))
    by_name = {(row["shape"], row["implementation"]): row for row in rows}
    assert by_name["full/denoise/b1/c48", "dllm"]["status"] == "ok"
    assert by_name["sliding-anchored/mixed/b3/c24", "sdpa"]["status"] == "ok"
    assert float(by_name["full/denoise/b1/c48", "sdpa"]["p50_ms"]) > 0
    assert by_name["full/denoise/b1/c48", "flex"]["status"].startswith("skipped: ")
    for shape, name in (  # the arguments vLLM's kernel gets, and the window it really has
        ("full/denoise/b1/c48", "vllm_unified"),
        ("sliding-anchored/mixed/b3/c24", "vllm_unified (symmetric)"),
    ):
        assert by_name[shape, name]["status"] == "ok"
    assert len(by_name) == len(rows) == 10
    assert (rows[0]["torch"], rows[0]["commit"]) == (torch.__version__, "abc")
    assert out.with_suffix(".svg").read_text().startswith("<svg")


@needs_triton
def test_a_wrong_result_gets_no_numbers(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    result = run("-c", BROKEN, str(out))
    assert result.returncode == 1, result.stdout + result.stderr
    rows = list(csv.DictReader(out.open()))
    assert {row["implementation"] for row in rows} == {"dllm"}
    assert all(row["status"] == "wrong" and row["p50_ms"] == "" for row in rows)


def test_the_check_would_notice_at_long_context() -> None:
    """There outputs are small: all zeros, or a part of the keys left out, must not pass."""
    shape = Shape(Layer("long", 2, 1, 64), "denoise", 1, 30000, 4, (0,))
    inputs = make_inputs(shape, "cpu")
    expected = reference(shape, inputs, None)
    right = expected[0].to(torch.bfloat16)
    allowed = tolerance(torch.bfloat16)
    assert row_error(right, shape, expected) <= allowed
    assert row_error(torch.zeros_like(right), shape, expected) > allowed
    assert row_error(torch.full_like(right, float("nan")), shape, expected) == float("inf")
    fewer = dataclasses.replace(shape, context=29000)
    assert row_error(reference(fewer, inputs, None)[0], shape, expected) > allowed
    one_wrong = right.clone()
    one_wrong[2, 1] = right[2, 0]
    assert row_error(one_wrong, shape, expected) > allowed


def test_targets_name_the_worst_shape() -> None:
    def result(shape: str, name: str, of_ceiling: float, ratio: float) -> Result:
        return Result(shape, name, "ok", 0.0, 1.0, 1.0, 1.0, 1.0, of_ceiling, ratio)

    lines = targets(
        [
            result("full/denoise/b1/c65536", "dllm", 0.7, 1.0),
            result("full/denoise/b8/c65536", "dllm", 0.5, 1.0),
            result("full/denoise/b1/c65536", "vllm_unified", 0.2, 1.5),
            result("sliding/denoise/b1/c65536", "vllm_unified (symmetric)", 0.2, 1.4),
            Result("full/denoise/b32/c65536", "dllm", "wrong", 1.0),
        ]
    )
    assert lines == [
        "0.6 of the ceiling at 64k: NOT reached, least 0.50 (full/denoise/b8/c65536)",
        "1.3 x vLLM on denoise: reached, least 1.40 (sliding/denoise/b1/c65536)",
    ]


def test_the_table_covers_what_the_models_do() -> None:
    shapes = table()
    assert len({shape.name for shape in shapes}) == len(shapes)
    for layer in (FULL, SLIDING, DRAFTER):
        mine = [shape for shape in shapes if shape.layer == layer]
        assert {shape.context for shape in mine} >= {1024, 8192, 65536, 131072}
        assert {shape.batch for shape in mine} >= {1, 8, 32}
    assert {shape.phase for shape in shapes if shape.layer == FULL} >= {"denoise", "fused", "mixed"}


def test_the_committed_compile_report_is_of_the_committed_tiles() -> None:
    """Nothing spills at head sizes 256 and 512 and tensor cores are used (Triton 3.9)."""
    report = csv.DictReader((ROOT / "bench" / "results" / "attention_sm90_compile.csv").open())
    rows = [row for row in report if row["triton"] == "3.9.0"]
    assert {(row["head_size"], row["is_split"]) for row in rows} >= {
        ("256", "False"), ("256", "True"), ("512", "False"), ("512", "True"),
    }  # fmt: skip
    for row in rows:
        tiles = HOPPER[int(row["head_size"]), 4 if row["dtype"] == "fp32" else 2]
        for name in ("block_m", "block_n", "num_warps", "num_stages"):
            assert int(row[name]) == getattr(tiles, name), row
        if row["cache_dtype"] == row["dtype"]:
            assert row["spill_stores"] == "0", row
        assert int(row["wgmma"]) > 0 or row["dtype"] == "fp32", row


def test_work_is_counted_over_visible_pairs() -> None:
    denoise = Shape(FULL, "denoise", 2, 1024, CANVAS, (0,))
    assert denoise.visible_pairs() == 2 * CANVAS * (1024 + CANVAS)
    assert denoise.flops() == 4 * 512 * 16 * denoise.visible_pairs()
    keys = 1024 + CANVAS
    assert denoise.bytes() == 2 * 2 * 2 * 512 * (CANVAS * 16 + keys * 2)
    windowed = Shape(SLIDING, "denoise", 1, 8192, CANVAS, (0,))
    assert windowed.visible_pairs() == CANVAS * (1023 + CANVAS)
    causal = Shape(FULL, "prefill", 1, 0, 64, (64,))
    assert causal.visible_pairs() == 64 * 65 // 2
