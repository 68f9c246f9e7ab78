"""Runs kernel_suite.py: in Triton's interpreter, or compiled where there is a GPU.

In a process of its own, as test_attention_kernel.py: `TRITON_INTERPRET` is read when Triton is
first imported. By hand:
`TRITON_INTERPRET=1 pytest --noconftest tests/grammar/kernel_suite.py`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.interpreter import run_suite

pytestmark = pytest.mark.slow

SUITE = "tests/grammar/kernel_suite.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs compiled on this machine")
def test_suite_in_the_interpreter() -> None:
    assert run_suite(SUITE, is_interpreted=True) >= 22


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_suite_compiled() -> None:
    assert run_suite(SUITE, is_interpreted=False) >= 22
