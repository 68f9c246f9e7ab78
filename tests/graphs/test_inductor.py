"""Runs ``inductor_suite`` in processes of its own: Inductor's code for a GPU, interpreted."""

import re

import pytest

from tests.support.process import run_python

pytestmark = pytest.mark.slow

NUM_TESTS = {"noise": 1, "entropy_bound": 4, "unmasking": 4, "backbones": 2}


@pytest.mark.parametrize("part", NUM_TESTS)
def test_what_inductor_makes_for_a_gpu(part):
    done = run_python(
        *("-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"),
        *("--timeout", "0", "tests/graphs/inductor_suite.py", "-k", part),
        environment={
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "0",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert re.search(rf"\b{NUM_TESTS[part]} passed", done.stdout)
