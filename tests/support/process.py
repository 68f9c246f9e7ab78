"""Starts Python processes for tests that need a fresh interpreter, for example to set variables."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 4000  # characters of stdout, and of stderr, that the message of a failure shows

# Variables for a process with an engine: no compilation, one thread, few log lines.
QUIET_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run_python(
    *arguments: str,
    environment: Mapping[str, str | None] | None = None,
    timeout: float = HANG_S,
    status: int = 0,
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in the repository's root, and check its exit status.

    If the status is another one, the test fails with the end of what the process printed.

    Args:
        environment: variables to set in addition to this process's; None removes one.
        timeout: seconds.
    """
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=_changed_environment(environment or {}),
        capture_output=True,
        input=given,
        text=True,
        timeout=timeout,
    )
    said = f"{finished.stdout[-SHOWN:]}\n{finished.stderr[-SHOWN:]}"
    assert finished.returncode == status, f"exit status {finished.returncode}: {said}"
    return finished


def start_python(
    *arguments: str, environment: Mapping[str, str | None] | None = None
) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS`` in the repository's root, for a test that watches it.

    ``stdout`` is a pipe with everything that it prints. Leaving a ``with`` block waits until it has
    ended.
    """
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=_changed_environment(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with some variables set, or removed (None).

    The repository comes first in PYTHONPATH, so that the tests of a checkout import its own code.
    """
    merged = {**os.environ, "PYTHONPATH": python_path(ROOT), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first; behind them, what it has (another vLLM, maybe)."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def printed_json(finished: subprocess.CompletedProcess[str]) -> Any:
    """The last line that a process printed, as JSON."""
    return json.loads(finished.stdout.splitlines()[-1])
