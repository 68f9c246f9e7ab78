"""bench/h200.py without a GPU: what is run, what is not and why, and what two engines leave."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from bench import h200, h200_engine
from bench.context import read_csv
from bench.profile_engine import BUILTIN, OURS, Job, Taken
from bench.step_ranges import GROUPS, write_trace
from tests.bench.test_bench_profile import ranges_of_a_step

ROOT = Path(__file__).parents[2]


def test_the_parts_fit_into_nine_minutes(tmp_path: Path) -> None:
    parts = h200.parts(tmp_path)
    assert sum(part.budget_s + h200.SETTLE_S for part in parts) < 9 * 60
    assert [part.name for part in parts][:1] == ["roofline"]


def test_without_a_gpu_it_says_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200, "_has_gpu", lambda: False)
    monkeypatch.setattr(h200, "run", lambda part, **_: f"ran {part.name}")
    assert h200.main(["--out", str(tmp_path)]) == 0
    outcome = {row["part"]: row["outcome"] for row in read_csv(tmp_path / "h200_parts.csv")}
    assert outcome.pop("roofline") == "ran roofline"
    assert set(outcome.values()) == {"NOT RUN: no GPU"}
    assert "No pass of an engine was measured." in capsys.readouterr().out


def test_engines_need_vllm_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200.importlib.util, "find_spec", lambda name: None)
    reasons = {
        part.name: h200.obstacle(part, is_toy=False, has_gpu=True) for part in h200.parts(tmp_path)
    }
    assert {name for name, why in reasons.items() if why} == {"engine-fp8", "engine-bf16"}
    assert "vLLM" in reasons["engine-fp8"]


def test_a_part_that_takes_too_long_is_ended_with_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = os.pidfd_open(int(process.stdout.readline()))
    h200.end_group(process)
    assert process.returncode is not None
    assert select.select([child], [], [], 60)[0], "the child is still there"  # readable: it ended
    os.close(child)


def test_a_failure_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = h200.Part("roofline", 60, (), ("bench.roofline", "--batch", "none"), "roofline")
    monkeypatch.setattr(h200, "parts", lambda out: [broken])
    assert h200.main(["--toy", "--out", str(tmp_path)]) == 1
    (row,) = read_csv(tmp_path / "h200_parts.csv")
    assert row["outcome"].startswith("FAILED, exit code 2")


def test_what_needs_no_vllm_imports_without_it() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from bench import components, h200, roofline, sampling_step\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert result.returncode == 0, result.stderr


class FakeEngine:
    """Answers a task at once: every pass takes 10 ms, and 20 ms in the second pair."""

    orders: list[str] = []

    def __init__(self, job: Job) -> None:
        self.job = job

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_ready(self) -> float:
        return 1.0

    def do(self, batch: int, index: int, *, is_profiled: bool) -> Taken:
        self.orders.append(self.job.server)
        running = min(batch, self.job.max_num_seqs)
        waves = -(-batch // running)
        passes = self.job.blocks * (self.job.steps + (self.job.server == BUILTIN)) * waves
        wall_ms = 10.0 * passes * (1 + index)
        rows = 32 * running
        path = Path(self.job.folder) / f"{self.job.name}-{batch}.json"
        steps = [ranges_of_a_step(1e4 * i, f"{running} {rows} {rows}") for i in range(passes)]
        write_trace(path, [one for step in steps for one in step])
        tokens = batch * 32 * self.job.blocks
        profiled = (wall_ms, str(path)) if is_profiled else (0.0, "")
        return Taken(batch, wall_ms, rows * passes, tokens, *profiled)


def test_engines_take_turns_and_leave_a_row_for_every_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200_engine, "EngineProcess", FakeEngine)
    FakeEngine.orders.clear()
    arguments = ["--weights", "bf16", "--toy", "--results", str(tmp_path)]
    assert h200_engine.main(arguments) == 0
    assert FakeEngine.orders == 2 * [OURS, BUILTIN, BUILTIN, OURS]
    rows = read_csv(tmp_path / "h200_engine_bf16.csv")
    assert len(rows) == 2 * 2 * (1 + len(GROUPS))
    passes = [row for row in rows if row["component"] == "pass"]
    assert {float(row["ms_per_step"]) for row in passes} == {15.0}  # of 10 and 20
    assert {(row["low_ms"], row["high_ms"]) for row in passes} == {("10", "20")}
    assert {row["model"] for row in rows} == {"toy"} and all(row["commit"] for row in rows)
    # Ours takes 32 passes for what takes the built-in 34.
    speed = {(row["server"], row["batch"]): float(row["tokens_per_s"]) for row in passes}
    assert speed[OURS, "1"] / speed[BUILTIN, "1"] == pytest.approx(17 / 16, rel=1e-5)  # six digits


def test_requests_beyond_the_built_ins_limit_wait(tmp_path: Path) -> None:
    job = Job("a model", str(tmp_path), BUILTIN, max_num_seqs=8, blocks=2)
    measured = h200_engine.Measured(job, batch=32)
    measured.add(FakeEngine(job))
    assert measured.passes_ms == [10.0]  # four waves of eight
    assert measured.breakdown is not None and measured.breakdown.step_ms == 10


def test_the_summary_leaves_toys_without_headroom(tmp_path: Path) -> None:
    (tmp_path / "roofline.csv").write_text("weights,batch,component,floor_ms\nfp8,1,pass,5.0\n")
    (tmp_path / "h200_engine_fp8.csv").write_text(
        "component,model,weights,batch,server,ms_per_step,tokens_per_s,machine\n"
        "pass,toy,fp8,1,ours,10.0,100.0,a laptop\n"
        "pass,released,fp8,1,ours,10.0,100.0,NVIDIA H200\n"
    )
    toy, released = h200.summary(tmp_path).splitlines()
    assert "floor" not in toy and "2.00 x its floor (NVIDIA H200)" in released
