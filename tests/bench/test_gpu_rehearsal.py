"""The three calls of bench/gpu/README.md at toy size, one after the other, as it rehearses them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT

pytestmark = pytest.mark.slow


def test_the_three_calls_pass_their_rehearsal(tmp_path: Path) -> None:
    """Each ends with status 0: held-out questions were answered rightly, and every engine ran."""
    folders = {name: tmp_path / name for name in ("LEASE_STATE", "SITE", "OUT")}
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"TOY": "1", "PATH": python}
    environment |= {name: str(path) for name, path in folders.items()}
    for call in ("1", "2", "3"):
        ran = subprocess.run(
            ["bash", "bench/gpu/run.sh", call],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert ran.returncode == 0, f"call {call}: {ran.stdout[-4000:]}"
    report = (folders["OUT"] / "report.txt").read_text()
    for engine in ("ours", "built-in", "ours-loop", "ours-triton"):
        assert f"== {engine}: done" in report
