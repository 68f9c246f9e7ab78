"""Runs the suites of the Triton kernels: interpreted, or compiled where there is a GPU.

Triton reads ``TRITON_INTERPRET`` when it is first imported, and vLLM must not find it set in the
servers that other tests start. So the suites get a process of their own, and are not collected
here. By hand: ``TRITON_INTERPRET=1 pytest --noconftest SUITE``, without the variable on a GPU.
"""

import importlib.util
import re

import pytest
import torch

from tests.support.process import run_python

pytestmark = pytest.mark.slow

# How many tests pass at least, in the interpreter. Some look into it, and are skipped on a GPU.
ATTENTION = {"tests/attention/attention_kernel_suite.py": 104}
OTHERS = {
    "tests/drafter/context_kernel_suite.py": 33,
    "tests/grammar/kernel_suite.py": 24,
    "tests/ops/row_stats_kernel_suite.py": 48,
    "tests/ops/tile_product_kernel_suite.py": 26,
}
SUITES = ATTENTION | OTHERS
CHECKS = {"tests/engine/kernel_check_suite.py": 24}
NUM_OF_THE_INTERPRETER = 7


def num_passed(*suites: str, interpret: str | None) -> int:
    """Run suites in a new process; fails with its output, returns how many tests passed."""
    command = ("-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", *suites)
    environment = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    result = run_python(*command, environment=environment)
    passed = re.search(r"(\d+) passed", result.stdout)
    return int(passed.group(1)) if passed else 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suites run compiled on this machine")
@pytest.mark.parametrize(
    "suites", [CHECKS, ATTENTION, OTHERS], ids=["checks", "attention", "others"]
)
def test_suites_in_the_interpreter(suites: dict[str, int]) -> None:
    assert num_passed(*suites, interpret="1") >= sum(suites.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_suites_compiled() -> None:
    assert num_passed(*SUITES, interpret=None) >= sum(SUITES.values()) - NUM_OF_THE_INTERPRETER
