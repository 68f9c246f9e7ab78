"""What a number means nothing without, CSV files that carry it on every row, and progress."""

import contextlib
import csv
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def provenance(module: str) -> dict[str, str]:
    """Commit, machine, versions and command line: the last columns of every CSV.

    Args:
        module: what ``python -m`` ran, for instance ``bench.serve``.
    """
    return {
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def commit() -> str:
    """Short hash of the checked-out commit, with ``-dirty`` if tracked files differ from it."""
    description = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return description.stdout.strip() or "unknown"


def machine() -> str:
    """The GPU, if there is one, otherwise the processor; and the number of cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def versions() -> str:
    """Of what the numbers depend on, as far as it is installed."""
    found = []
    for name in ("vllm", "torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def progress(text: str) -> None:
    """Say what is going on; no speeds, which may yet be refused."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One line a row, replacing the file; columns are those of the first row.

    Numbers keep six digits; None is an empty cell.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()}
            )


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, or none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
