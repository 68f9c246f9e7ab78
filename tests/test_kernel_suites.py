"""Runs the suites of the Triton kernels: interpreted, or compiled where there is a GPU.

Triton reads ``TRITON_INTERPRET`` when it is first imported, and vLLM must not find it set in the
servers that other tests start. So a suite gets a process of its own, and is not collected here. By
hand: ``TRITON_INTERPRET=1 pytest --noconftest tests/attention/attention_kernel_suite.py -k ...``.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.interpreter import run_suite

pytestmark = pytest.mark.slow

# How many tests pass at least: in the interpreter, and without those that look into it.
SUITES = {
    "tests/attention/attention_kernel_suite.py": (130, 125),
    "tests/drafter/context_kernel_suite.py": (39, 39),
    "tests/grammar/kernel_suite.py": (22, 22),
    "tests/ops/row_stats_kernel_suite.py": (34, 34),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suites run compiled on this machine")
@pytest.mark.parametrize("suite", SUITES)
def test_suite_in_the_interpreter(suite: str) -> None:
    assert run_suite(suite, is_interpreted=True) >= SUITES[suite][0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("suite", SUITES)
def test_suite_compiled(suite: str) -> None:
    assert run_suite(suite, is_interpreted=False) >= SUITES[suite][1]
