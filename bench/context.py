"""What all commands share: where a number comes from, CSV files, progress, how failures end."""

import argparse
import csv
import functools
import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm.settings.command import CommandError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

Row = dict[str, Any]  # of a CSV file that is written; None where there is nothing to say
Rows = list[dict[str, str]]  # of a CSV file that was read


@functools.cache
def provenance() -> dict[str, str]:
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else "bench"
    return {
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def commit() -> str:
    """Short hash of the checked-out commit, with ``-dirty`` if tracked files differ from it.

    The environment variable ``DLLM_COMMIT`` names it in a copy of the files without ``.git``.
    """
    if given := os.environ.get("DLLM_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    description = subprocess.run(command, capture_output=True, text=True, check=False)
    return description.stdout.strip() or "unknown"


def machine() -> str:
    import torch

    from dllm.train.optimizer import processor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"{processor(device)}, {os.cpu_count()} cores"


def versions() -> str:
    names = "vllm", "torch", "triton", "transformers"
    found = [next(iter(importlib.metadata.distributions(name=name)), None) for name in names]
    return ", ".join(f"{one.name} {one.version}" for one in found if one)


def publish(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    write_csv(path, [{**row, **provenance()} for row in rows])


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A line a row, with the columns of the first; floats have six digits, None is nothing."""

    def cell(value: object) -> object:
        return f"{value:.6g}" if isinstance(value, float) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path) -> Rows:
    """No rows if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def command_line(description: str | None, writes: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if writes:
        parser.add_argument("--results", type=Path, default=RESULTS, help="folder of CSV files")
    return parser


def progress(text: str) -> None:
    """Print a line with the time to standard error; no speeds, which may yet be refused."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class GateError(RuntimeError):
    """Answers are wrong, so that nothing may be timed; the message says what is wrong."""


def reporting_failures(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """A ``main`` that prints why there is no speed: exit code 1 for wrong outputs, 2 otherwise.

    Ended by SIGTERM it exits as by an exception, so that its servers are stopped: some of them
    stand still while another is measured, and would stay for ever.
    """

    @functools.wraps(main)
    def guarded(arguments: Sequence[str] | None = None) -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            return main(arguments)
        except GateError as error:
            print(f"No speed is reported, because outputs are wrong:\n{error}", file=sys.stderr)
            return 1
        except (CommandError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2

    return guarded
