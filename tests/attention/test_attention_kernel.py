"""Runs attention_kernel_suite.py: in Triton's interpreter, or compiled where there is a GPU.

The interpreter is chosen when Triton is first imported, by an environment variable that must not
leak into the servers that other tests start; so the suite gets a process of its own. By hand:
`TRITON_INTERPRET=1 pytest --noconftest tests/attention/attention_kernel_suite.py -k ...`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.interpreter import run_suite

pytestmark = pytest.mark.slow

SUITE = "tests/attention/attention_kernel_suite.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs compiled on this machine")
def test_suite_in_the_interpreter() -> None:
    assert run_suite(SUITE, is_interpreted=True) >= 132


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_suite_compiled() -> None:
    # Without those that look into the interpreter.
    assert run_suite(SUITE, is_interpreted=False) >= 127
