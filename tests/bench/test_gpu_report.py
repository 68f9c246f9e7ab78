"""bench/gpu_report.py: every millisecond above the floor is in a line of its tables."""

import re
from pathlib import Path

import pytest

from bench import gpu_report, kernel_table, step_parts
from bench.context import write_csv
from bench.gpu_report import CLASS_OF, PART_OF, Found, gap_table, gaps, report, speeds, summed
from bench.roofline import H200


def write_profile(folder: Path, server: str = "ours") -> None:
    """A step of 10 ms at one request, and its kernels, of 9 ms."""
    about = {"mode": "compiled", "server": server, "concurrency": 1}
    shares = {step_parts.FORWARD: 0.7, step_parts.HEAD: 0.1, step_parts.IDLE: 0.2}
    rows = [
        about | {"component": part, "group": "", "share": shares.get(part, 0.0), "step_ms": 10.0}
        for part in step_parts.GROUPS
    ]
    write_csv(folder / "profile-fp8/profile_cuda.csv", rows)
    kernels = {"fused_moe_kernel": 4.0, "canvas_attention_kernel": 2.0, "nvjet_x": 2.0, "add": 1.0}
    kernel_rows: list[dict[str, object]] = [
        about | {"kernel": name, "class": kernel_table.class_of(name), "ms": ms, "share": ms / 9}
        for name, ms in kernels.items()
    ]
    write_csv(folder / "profile-fp8/kernels_cuda.csv", kernel_rows)


def test_the_lines_of_a_table_add_up_to_what_is_above_the_floor(tmp_path: Path) -> None:
    write_profile(tmp_path)
    by_part, by_class = gaps(Found.of([tmp_path], is_toy=False))
    floor = sum(Found.of([tmp_path], is_toy=False).floors("fp8", 1).values())
    for table, total in ((by_part, 10.0), (by_class, 9.0)):
        title, _, *lines = table.splitlines()
        assert f"{total:.3f} ms a pass, floor {floor:.3f}" in title
        above = [float(line.split()[-2]) for line in lines]
        assert sum(above) == pytest.approx(total - floor, abs=0.01)  # 12 lines of 3 decimals
        shares = [float(line.split()[-1].rstrip("%")) for line in lines]
        assert sum(shares) == pytest.approx(100, abs=1)
    assert "compiled" not in by_part and "batch 1, ours, by component" in by_part


def test_every_component_of_the_floor_has_a_line(tmp_path: Path) -> None:
    floors = Found.of([tmp_path], is_toy=False).floors("fp8", 8)
    for where, other in ((PART_OF, step_parts.FORWARD), (CLASS_OF, kernel_table.PRODUCTS)):
        assert set(where) <= set(floors)
        found = summed(floors, where, other)
        assert sum(found.values()) == pytest.approx(sum(floors.values()))
    assert set(PART_OF.values()) <= set(step_parts.GROUPS)
    table = gap_table("t", {"a": 3.0}, {"a": 1.0, "b": 1.0})
    assert re.search(r"b +0\.000 +1\.000 +-1\.000 +-100\.0%", table)  # faster than its floor


def test_measured_ceilings_take_the_place_of_the_committed_ones(tmp_path: Path) -> None:
    assert Found.of([tmp_path], is_toy=False).gpu() == H200
    rows = [{"shape": "x", "copy": 2e12, "bf16": 5e14}]
    write_csv(tmp_path / "attention/attention_gpu.csv", rows)
    gpu = Found.of([tmp_path], is_toy=False).gpu()
    assert (gpu.copy, gpu.bf16, gpu.fp8) == (2e12, 5e14, 1e15)


def test_speeds_stand_beside_the_floor_and_wrong_runs_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "contestant": name,
            "pair": 0,
            "concurrency": 1,
            "ms_per_denoise_step": ms,
            "tokens_per_s": speed,
            "machine": "NVIDIA H200",
        }
        for name, ms, speed in (("ours", 14.4, 100.0), ("built-in --x", "", ""))
    ]
    write_csv(tmp_path / "serve-fp8/serve_compiled.csv", rows)
    found = Found.of([tmp_path], is_toy=False)
    floor = sum(found.floors("fp8", 1).values())
    (line,) = speeds(found, is_toy=False)
    assert f"{14.4 / floor:.2f} x its floor  ours (NVIDIA H200)" in line
    assert "floor" not in speeds(found, is_toy=True)[0]


def test_calls_in_several_folders_make_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, part in ((1, "start"), (2, "profile-fp8")):
        outcome = [{"part": part, "outcome": "ran, 9 s"}]
        write_csv(tmp_path / str(number) / "gpu_parts.csv", outcome)
    write_profile(tmp_path / "2", server="built-in")
    assert gpu_report.main([str(tmp_path / "1"), str(tmp_path / "2")]) == 0
    out = capsys.readouterr().out
    assert "start          ran, 9 s" in out and "profile-fp8    ran, 9 s" in out
    assert "built-in, by class" in out
    assert "no figure means anything" in report(tmp_path / "2", is_toy=True)
