"""Runs ``inductor_suite`` in a process of its own: Inductor's code for a GPU, interpreted."""

import re

import pytest

from tests.support.process import run_python

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NUM_TESTS = 1


def test_what_inductor_makes_for_a_gpu():
    done = run_python(
        *("-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"),
        "tests/graphs/inductor_suite.py",
        environment={
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "0",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert re.search(rf"\b{NUM_TESTS} passed", done.stdout)
