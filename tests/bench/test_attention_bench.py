"""The attention benchmark's plumbing: a smoke run, and that wrong results get no numbers."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import attention
from bench.attention import reference, row_error, tolerance
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
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import bench.attention as benchmark
honest = benchmark.PREPARE["dllm"]
def broken(shape, inputs):
    run = honest(shape, inputs)
    def forgetful():
        out = run()
        out[-1] = 0
        return out
    return forgetful
benchmark.PREPARE["dllm"] = broken
sys.exit(benchmark.main(["--smoke", "--results", sys.argv[1]]))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@needs_triton
def test_smoke_run_writes_a_csv(tmp_path: Path) -> None:
    result = run("-m", "bench.attention", "--smoke", "--results", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = list(csv.DictReader((tmp_path / "attention_smoke.csv").open()))
    by_name = {(row["shape"], row["implementation"]): row for row in rows}
    assert by_name["full/denoise/b1/c48", "dllm"]["status"] == "ok"
    assert by_name["sliding-anchored/mixed/b3/c24", "sdpa"]["status"] == "ok"
    assert float(by_name["full/denoise/b1/c48", "sdpa"]["p50_ms"]) > 0
    assert by_name["full/denoise/b1/c48", "vllm_unified"]["status"] == "skipped: needs a GPU"
    assert len(by_name) == len(rows) == 6
    assert rows[0]["commit"] and f"torch {torch.__version__}" in rows[0]["versions"]


@needs_triton
def test_a_wrong_result_gets_no_numbers(tmp_path: Path) -> None:
    result = run("-c", BROKEN, str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    rows = list(csv.DictReader((tmp_path / "attention_smoke.csv").open()))
    assert {row["implementation"] for row in rows} == {"dllm"}
    assert all(row["status"] == "wrong" and row["p50_ms"] == "" for row in rows)


def test_shapes_that_are_not_there_are_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attention.main(["--smoke", "--only", "wide", "--results", str(tmp_path)]) == 2
    assert "--only wide: in no shape's name." in capsys.readouterr().err


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


def test_the_table_covers_what_the_models_do() -> None:
    shapes = table()
    assert len({shape.name for shape in shapes}) == len(shapes)
    for layer in (FULL, SLIDING, DRAFTER):
        mine = [shape for shape in shapes if shape.layer == layer]
        assert {shape.context for shape in mine} >= {1024, 8192, 65536, 131072}
        assert {shape.batch for shape in mine} >= {1, 8, 32}
    assert {shape.phase for shape in shapes if shape.layer == FULL} >= {"denoise", "fused", "mixed"}


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


def test_the_first_call_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product of a process sets cuBLAS up, which fails while a graph is captured."""
    pytest.importorskip("triton", reason="its timer is replaced")
    import triton.testing

    happened: list[str] = []

    @contextlib.contextmanager
    def capture(graph: object) -> Iterator[None]:
        happened.append("capture")
        yield
        happened.append("end of capture")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(triton.testing, "do_bench", lambda *_, **__: 2.5)
    assert attention.median_ms(lambda: happened.append("call"), "cuda") == 2.5
    assert happened == ["call", "wait", "capture", "call", "end of capture"]
