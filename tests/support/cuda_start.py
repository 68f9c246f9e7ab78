"""Runs ``cuda_start_worker`` in a process of its own."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.process import run_python


def rehearse(gpu: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A report for each case; both as ``cuda_start_worker`` says."""
    plain: dict[str, Any] = {"flags": {}, "batches": [], "loads": False, "flash": False}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    finished = run_python(
        "-m",
        "tests.support.cuda_start_worker",
        gpu,
        environment=quiet,
        given="\n".join(json.dumps(plain | case) for case in cases),
        timeout=600,
    )
    reports: list[dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return reports
