"""bench/context_kernel.py: the definition in torch, and what counts as agreement."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.context import read_csv
from bench.context_kernel import PAGE_SIZE, SMOKE_SIZES, TINY, Inputs, disagreement
from tests.support.process import run_python


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_smoke_run_agrees_and_writes_every_size(tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    run_python("-m", "bench.context_kernel", "--smoke", "--results", str(tmp_path))
    rows = read_csv(tmp_path / "context_kernel.csv")
    assert [(row["tokens"], row["implementation"]) for row in rows] == [
        (str(size), name) for size in SMOKE_SIZES for name in ("dllm", "torch")
    ]


def test_a_wrong_number_or_none_is_a_disagreement() -> None:
    nothing: Any = None
    inputs = Inputs(TINY, nothing, torch.zeros(21, TINY.hidden), nothing, torch.arange(21))
    ones, others = inputs.caches(), inputs.caches()
    for cache in (*ones, *others):
        cache.key.fill_(1.0)
        cache.value.fill_(1.0)
    assert disagreement(ones, others, torch.bfloat16) == 0
    ones[1].value[1, PAGE_SIZE - 1, 0, 3] = 1.1
    assert disagreement(ones, others, torch.bfloat16) > 1
    ones[1].value[1, PAGE_SIZE - 1, 0, 3] = float("nan")
    assert disagreement(ones, others, torch.bfloat16) == float("inf")
