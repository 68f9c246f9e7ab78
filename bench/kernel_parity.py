"""Every Triton kernel against its definition, on this device: the cases of the test suites.

    python -m bench.kernel_parity                       # compiled on a GPU, else interpreted
    python -m bench.kernel_parity --only tests/ops
    python -m bench.kernel_parity --smoke               # one case of each suite

The suites (``*_kernel_suite.py``) compare kernels with dense or fp64 definitions, element by
element, and state their tolerances. They run side by side, each in --shards processes of its own:
most of the time the compiler works. Written to --results: parity.csv, a line for each case, after
every case. Exits with 1 when a case failed or a process ran none.
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
FAILED, SOME_CASES_FAILED = "failed", 1  # of a case, and the exit code of pytest
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

    def __init__(self, suite: str, parent: Connection, chosen: slice) -> None:
        self._suite, self._parent, self._chosen = suite, parent, chosen

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave the cases of this process only."""
        items[:] = items[self._chosen]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case that ran, was skipped, or failed before or after it ran."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            why = ""
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                why = " ".join(str(crash.message if crash else report.longrepr).split())[:500]
            self._parent.send(Case(self._suite, name, report.outcome, report.duration, why))


def run_suite(suite: str, parent: Connection, log: Path, chosen: slice) -> None:
    """In a process of its own: send every chosen case; the exit code is pytest's."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import pytest

    options = ["--noconftest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    plugin = Reporter(suite, parent, chosen)
    sys.exit(pytest.main([*options, str(ROOT / suite)], plugins=[plugin]))


def run_all(
    processes: Sequence[tuple[str, slice]],
    path: Path,
    logs: Path,
    run: Callable[..., None] = run_suite,
) -> list[Case]:
    """Every case of every suite, as they come.

    Args:
        processes: which cases of which suite each runs.
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
    for index, (suite, chosen) in enumerate(processes):
        ours, theirs = context.Pipe(duplex=False)
        log = logs / f"{Path(suite).stem}-{index}.log"
        process = context.Process(target=run, args=(suite, theirs, log, chosen), daemon=True)
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
                if process.exitcode not in (0, SOME_CASES_FAILED):
                    add(Case(suite, "", FAILED, 0.0, f"its process: exit code {process.exitcode}"))
    return cases


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="suites whose path contains this")
    parser.add_argument("--shards", type=int, help="of a suite; default: so that all cores work")
    parser.add_argument("--smoke", action="store_true", help="one case of each suite")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="folder of the CSV")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites, print what failed, write the CSV."""
    options = parse(arguments)
    if importlib.util.find_spec("triton") is None:
        print(TRITON_IS_ABSENT, file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that are started
    found = suites(options.only)
    shards = options.shards or max(1, (os.cpu_count() or 1) // max(1, len(found)))
    path = options.results / FILE
    chosen = [slice(1)] if options.smoke else [slice(n, None, shards) for n in range(shards)]
    processes = [(suite, one) for suite in found for one in chosen]
    with tempfile.TemporaryDirectory(prefix="dllm-parity-") as logs:
        cases = run_all(processes, path, Path(logs))
        if any(case.outcome == FAILED for case in cases):
            for log in sorted(Path(logs).iterdir()):
                lines = log.read_text(errors="replace").splitlines()
                if any("failed" in line or "rror" in line for line in lines[-SHOWN:]):
                    print("\n".join([f"--- {log.stem}", *lines[-SHOWN:]]))
    print(f"{summary(cases)}\n{path}")
    return int(not cases or any(case.outcome == FAILED for case in cases))


if __name__ == "__main__":
    sys.exit(main())
