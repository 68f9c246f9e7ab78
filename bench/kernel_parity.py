"""Every Triton kernel against its definition, on this device: the cases of the test suites.

    python -m bench.kernel_parity                       # compiled on a GPU, else interpreted
    python -m bench.kernel_parity --only tests/ops
    python -m bench.kernel_parity --smoke               # one case of each suite

The suites (``*_kernel_suite.py``) compare kernels with dense or fp64 definitions, element by
element, and state their tolerances. They run side by side, each in a process of its own. Written to
--results: parity.csv, a line for each case, after every case. Exits with 1 when a case failed or a
suite ran none.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from bench.context import RESULTS, ROOT, provenance, write_csv

FILE = "parity.csv"
FAILED = "failed"
SHOWN = 40  # last lines of a suite that failed
TRITON_IS_ABSENT = "Triton is not installed"


class Case(NamedTuple):
    """What became of a case; ``outcome`` as pytest says it."""

    suite: str
    name: str
    outcome: str
    seconds: float
    why: str


def suites(only: str) -> list[str]:
    """Paths from the root."""
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/*_kernel_suite.py"))
    return [path for path in found if only in path]


class Reporter:
    """A plugin of pytest that sends each case to the parent process."""

    def __init__(self, suite: str, parent: Connection, *, is_smoke: bool) -> None:
        self._suite, self._parent, self._is_smoke = suite, parent, is_smoke

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave the first case only."""
        if self._is_smoke:
            del items[1:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case that ran, was skipped, or failed before or after it ran."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            lines = str(report.longrepr or "").strip().splitlines()
            why = lines[-1] if report.failed and lines else ""
            self._parent.send(Case(self._suite, name, report.outcome, report.duration, why))


def run_suite(suite: str, parent: Connection, log: Path, is_smoke: bool) -> None:
    """In a process of its own: send every case; the exit code is pytest's."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import pytest

    options = ["--noconftest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    plugin = Reporter(suite, parent, is_smoke=is_smoke)
    sys.exit(pytest.main([*options, str(ROOT / suite)], plugins=[plugin]))


def run_all(
    chosen: Sequence[str],
    path: Path,
    logs: Path,
    *,
    is_smoke: bool,
    run: Callable[..., None] = run_suite,
) -> list[Case]:
    """Every case of every suite, as they come.

    Args:
        path: of the CSV, which is written after each.
        logs: folder of what the suites print.
        run: what a process runs, with the arguments of ``run_suite``.
    """
    context = multiprocessing.get_context("spawn")  # Triton reads its variable when imported
    cases: list[Case] = []
    about = provenance("bench.kernel_parity")

    def add(case: Case) -> None:
        cases.append(case)
        write_csv(path, [one._asdict() | about for one in cases])

    running: dict[Any, tuple[str, Any]] = {}
    for suite in chosen:
        ours, theirs = context.Pipe(duplex=False)
        arguments = suite, theirs, log_of(suite, logs), is_smoke
        process = context.Process(target=run, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that its end is noticed
        running[ours] = suite, process
    while running:
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            try:
                add(ready.recv())
            except EOFError:
                suite, process = running.pop(ready)
                process.join()
                has_failed = any(one.suite == suite and one.outcome == FAILED for one in cases)
                if process.exitcode and not has_failed:
                    add(Case(suite, "", FAILED, 0.0, f"its process: exit code {process.exitcode}"))
    return cases


def log_of(suite: str, logs: Path) -> Path:
    """Where a suite prints to."""
    return logs / f"{Path(suite).stem}.log"


def summary(cases: Sequence[Case]) -> str:
    """How many of each suite passed, and what failed."""
    lines = []
    for suite in dict.fromkeys(case.suite for case in cases):
        counts = Counter(case.outcome for case in cases if case.suite == suite)
        total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        lines.append(f"{suite}: {total}")
    failed = [case for case in cases if case.outcome == FAILED]
    lines += [f"FAILED {case.suite} {case.name}: {case.why[:200]}" for case in failed]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites, print what failed, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="suites whose path contains this")
    parser.add_argument("--smoke", action="store_true", help="one case of each suite")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="folder of the CSV")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print(TRITON_IS_ABSENT, file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that are started
    path = options.results / FILE
    with tempfile.TemporaryDirectory(prefix="dllm-parity-") as logs:
        cases = run_all(suites(options.only), path, Path(logs), is_smoke=options.smoke)
        for suite in sorted({case.suite for case in cases if case.outcome == FAILED}):
            lines = log_of(suite, Path(logs)).read_text(errors="replace").splitlines()
            print("\n".join([f"--- {suite}", *lines[-SHOWN:]]))
    print(f"{summary(cases)}\n{path}")
    return int(not cases or any(case.outcome == FAILED for case in cases))


if __name__ == "__main__":
    sys.exit(main())
