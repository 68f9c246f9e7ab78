"""Runs attention_kernel_suite.py: in Triton's interpreter, or compiled where there is a GPU.

The interpreter is chosen when Triton is first imported, by an environment variable that must not
leak into the servers that other tests start; so the suite gets a process of its own. By hand:
`TRITON_INTERPRET=1 pytest --noconftest tests/attention/attention_kernel_suite.py -k ...`.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from tests.support.process import run_python

SUITE = "tests/attention/attention_kernel_suite.py"


def run_suite(environment: dict[str, str], suite: str = SUITE) -> int:
    """Run a suite in a new process; fails with its output, returns the number of passed tests."""
    base = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
    options = ("--noconftest", "-q", "-p", "no:cacheprovider")
    result = run_python(
        "-m", "pytest", *options, suite, environment=base | environment, timeout=1200
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    return int(passed.group(1)) if passed else 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs compiled on this machine")
def test_suite_in_the_interpreter() -> None:
    assert run_suite({"TRITON_INTERPRET": "1"}) >= 98


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_suite_compiled() -> None:
    assert run_suite({}) >= 95  # without those that look into the interpreter
