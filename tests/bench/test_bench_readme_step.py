"""bench/readme_step.py: the README's sections about one step say what the CSV files say."""

from pathlib import Path

import pytest

from bench import roofline, scaling
from bench.context import write_csv
from bench.profile_engine import BUILTIN, OURS
from bench.profile_step import Breakdown
from bench.readme_step import floors, step_growth, step_time
from bench.scaling import COMPONENTS, Point
from bench.step_ranges import FORWARD, GROUPS, IPC
from bench.step_trace import Step

CONTEXT = dict.fromkeys(("commit", "machine", "versions", "command"), "known")


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    for section in (step_time, step_growth, floors):
        assert section(tmp_path).startswith("Not ")


def test_step_time_sums_the_components_of_a_group(tmp_path: Path) -> None:
    parts = dict.fromkeys(GROUPS, 0.0) | {FORWARD: 6.0, IPC: 4.0}
    rows = [
        {"mode": "eager", "server": server, "concurrency": 2} | row | CONTEXT
        for server in (OURS, BUILTIN)
        for row in Breakdown.of([Step(10.0, parts)] * 10).rows()
    ]
    write_csv(tmp_path / "profile_cpu.csv", rows)
    text = step_time(tmp_path)
    for server in (OURS, BUILTIN):
        assert f"| {server}, eager | 2 | 10.00 | 40% | 60% | 0% | 0% | 0% |" in text


def test_step_growth_names_what_is_superlinear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def times(x: int) -> dict[str, float]:
        return dict.fromkeys(COMPONENTS, 1.0) | {"step": 1.0 + x, "forward": x * x / 8}

    done = [{Point("canvas", x): times(x) for x in (32, 64, 128, 256)}] * 3
    write_csv(tmp_path / "scaling.csv", [row | CONTEXT for row in scaling.report("canvas", done)])
    line = "| canvas 32 to 256 | 33.0 to 257.0 | linear | 1.00 [0.98 .. 1.02] | forward |"
    assert line in step_growth(tmp_path)


def test_floors_leave_toys_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["--weights", "fp8", "--batch", "1", "--results", str(tmp_path)])
    assert "| not measured |" in floors(tmp_path)
    (tmp_path / "h200_engine_fp8.csv").write_text(
        "component,model,weights,batch,server,ms_per_step\n"
        "pass,toy,fp8,1,ours,1.0\npass,released,fp8,1,ours,9.5\n"
    )
    assert "| ours 9.5 ms |" in floors(tmp_path)
