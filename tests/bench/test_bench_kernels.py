"""bench/kernels.py: what it times is compared first; every implementation, at toy size."""

import importlib.util
from pathlib import Path

import pytest
import torch

from bench import kernels, sampling_step
from bench.context import GateError, read_csv
from tests.support.process import run_python

ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_implementation_agrees_and_is_timed(tmp_path: Path) -> None:
    run_python(
        "-m", "bench.kernels", "--smoke", "--results", str(tmp_path), environment=ENVIRONMENT
    )
    for name, num_shapes, implementations in (
        ("attention", 2, ["dllm"]),
        ("context", 1, ["vllm", "dllm"]),
        ("sampler", 2, [sampling_step.BUILTIN, sampling_step.SPARSE, sampling_step.EXACT]),
    ):
        rows = read_csv(tmp_path / f"{name}_cpu.csv")
        assert [row["implementation"] for row in rows] == num_shapes * implementations
        assert all(float(row["p50_ms"]) > 0 and float(row["faster"]) > 0 for row in rows)


def case(problem: str) -> kernels.Case:
    runs = {"one": lambda: torch.ones(2), "other": lambda: 2 * torch.ones(2)}

    def wrong(expected: torch.Tensor, found: torch.Tensor) -> str:
        return problem if found.sum() > 2 else ""

    return kernels.Case({"rows": 2}, runs, lambda: torch.ones(2), wrong)


def test_what_computes_something_else_has_no_time() -> None:
    assert len(kernels.measure(case(""), rounds=2, device="cpu")) == 2
    with pytest.raises(GateError, match="other: far away"):
        kernels.measure(case("far away"), rounds=2, device="cpu")


def test_differences_beyond_rounding_are_found() -> None:
    expected = torch.randn(4, 8)
    assert not kernels._far_apart(torch.bfloat16, expected, expected.bfloat16())
    assert kernels._far_apart(torch.bfloat16, expected, expected.bfloat16() * 1.1)
    weight = torch.randn(5, 8, dtype=torch.bfloat16)
    ours = sampling_step.Outcome(torch.zeros(4), torch.zeros(4), torch.ones(4, 8))
    assert not sampling_step.disagree(weight, ours, ours)
    for changed in (
        ours._replace(argmax=torch.ones(4)),
        ours._replace(entropy=torch.ones(4)),
        ours._replace(soft=2 * ours.soft),
    ):
        assert sampling_step.disagree(weight, ours, changed)


def test_a_ratio_is_one_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([4.0, 2.0, 1.0, 8.0, 9.0, 3.0])  # one, other; other, one; one, other
    monkeypatch.setattr(kernels, "milliseconds", lambda run, device: next(times))
    one, other = kernels.measure(case(""), rounds=3, device="cpu")
    assert one["faster"] == 1 and one["p50_ms"] == 8
    assert [other[name] for name in ("faster_low", "faster", "faster_high")] == [2, 3, 8]
