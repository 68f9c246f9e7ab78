"""bench/kernel_parity.py: every case is in the CSV, and a suite that breaks is a failure."""

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from bench import kernel_parity
from bench.context import ROOT, read_csv
from bench.kernel_parity import Case


def stand_in(suite: str, parent: Connection, log: Path, chosen: slice) -> None:
    """A suite of two cases; "broken" ends after the first, "empty" before it."""
    log.write_text("what it printed")
    if suite != "empty":
        parent.send(Case(suite, "first", "passed", 0.5, ""))
    if suite != "whole":
        sys.exit(3)
    parent.send(Case(suite, "second", "failed", 0.5, "AssertionError: off by 1"))
    sys.exit(1)


def test_every_case_is_written_and_broken_suites_fail(tmp_path: Path) -> None:
    path = tmp_path / "parity.csv"
    processes = [(suite, slice(None)) for suite in ("whole", "broken", "empty")]
    cases = kernel_parity.run_all(processes, path, tmp_path, stand_in)
    rows = {(row["suite"], row["name"]): (row["outcome"], row["why"]) for row in read_csv(path)}
    assert rows == {
        ("whole", "first"): ("passed", ""),
        ("whole", "second"): ("failed", "AssertionError: off by 1"),
        ("broken", "first"): ("passed", ""),
        ("broken", ""): ("failed", "its process: exit code 3"),
        ("empty", ""): ("failed", "its process: exit code 3"),
    }
    said = kernel_parity.summary(cases)
    assert "whole: 1 passed, 1 failed" in said and "FAILED whole second: AssertionError" in said


SUITE = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_it(number):
    assert number != 3, "three"
"""


def test_processes_share_the_cases_of_a_suite(tmp_path: Path) -> None:
    suite = tmp_path / "suite.py"
    suite.write_text(SUITE)
    processes = [(str(suite), slice(n, None, 2)) for n in range(2)]
    cases = kernel_parity.run_all(processes, tmp_path / "parity.csv", tmp_path)
    assert {case.name: case.outcome for case in cases} == {
        f"test_it[{number}]": "failed" if number == 3 else "passed" for number in range(5)
    }
    assert len(cases) == 5
    assert "three" in "".join(case.why for case in cases)


def test_every_kernel_has_a_suite() -> None:
    """One of them imports each module with Triton kernels, or a module that imports it."""
    suites = "".join((ROOT / path).read_text() for path in kernel_parity.suites(""))
    modules = [path for room in ("attention", "dllm") for path in (ROOT / room).rglob("*.py")]
    sources = {path: path.read_text() for path in modules}
    reached = suites + "".join(
        text for path, text in sources.items() if dotted(path) in suites and "triton" in text
    )
    kernels = [dotted(path) for path, text in sources.items() if "\n@triton.jit" in text]
    assert len(kernels) >= 8
    for name in kernels:
        package, _, module = name.rpartition(".")
        assert name in reached or f"from {package} import {module}" in reached, name


def dotted(path: Path) -> str:
    """The name of a module."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name.startswith("dllm.") else f"dllm.{name}"  # dllm/attention is a link
