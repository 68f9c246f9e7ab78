"""Every kernel beside its definition, right and wrong ones, in Triton's interpreter."""

from tests.support.interpreter import run_suite


def test_kernels_in_the_interpreter():
    assert run_suite("tests/engine/kernel_check_suite.py", is_interpreted=True) == 17
