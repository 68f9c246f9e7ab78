"""bench/profile_step.py: every instant is counted once; traces that are wrong give no table."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import profile_step, step_parts
from bench.context import read_csv
from bench.profile_step import BUILTIN, OURS, Breakdown, Taken, report, trace_problems
from bench.step_parts import (
    BATCH,
    DECISIONS,
    FORWARD,
    GROUPS,
    HEAD,
    IDLE,
    INPUTS,
    LOOP,
    PREFIX,
    SAMPLER,
    SCHEDULING,
    SOFT_EMBEDDING,
    STATISTICS,
    STEP,
    Named,
    Range,
    name_parts,
    unname_parts,
)
from bench.step_trace import Piece, Step, Trace, innermost, overlay

STEP_US = 10_000.0


def ranges_of_a_step(start: float, rows: str = "1 32 32") -> list[Range]:
    """Ten milliseconds: 1 scheduling, 2 inputs, 4 forward, 1.5 sampling, the rest in the engine."""

    def one(name: str, begin: float, end: float) -> Range:
        return Range(name, start + begin, start + end)

    return [
        one(STEP, 0, 0),
        one(LOOP, 0, 9_900),
        one(SCHEDULING, 0, 1_000),
        one(INPUTS, 1_200, 7_200),
        one(f"{BATCH} {rows}", 1_500, 1_500),
        one(FORWARD, 3_200, 7_200),
        one(SAMPLER, 7_300, 8_800),
        one(HEAD, 7_400, 7_900),
        one(DECISIONS, 7_900, 8_700),
    ]


def trace_of(num_steps: int) -> Trace:
    return Trace([r for i in range(num_steps) for r in ranges_of_a_step(i * STEP_US)])


def test_the_parts_of_a_step_add_up_to_its_wall_time() -> None:
    steps = trace_of(3).steps()
    assert len(steps) == 2  # the last has no end
    for step in steps:
        assert step.wall_ms == 10
        assert sum(step.parts_ms.values()) == pytest.approx(step.wall_ms)
        assert step.is_denoise_only and step.num_reqs == 1
    expected = {SCHEDULING: 1, INPUTS: 2, FORWARD: 4, HEAD: 0.5, DECISIONS: 0.8, SAMPLER: 0.2}
    for part, milliseconds in expected.items():
        assert steps[0].parts_ms[part] == pytest.approx(milliseconds), part
    # 0.2 before the worker, 0.1 in it between two calls, 1.1 after it; 0.1 belongs to nobody.
    assert steps[0].parts_ms[LOOP] == pytest.approx(1.4)
    assert steps[0].parts_ms[IDLE] == pytest.approx(0.1)


def test_heads_and_prompts_are_no_denoise_steps() -> None:
    for rows in ("1 0 64", "1 32 64", "0 0 0"):
        trace = Trace([*ranges_of_a_step(0, rows), *ranges_of_a_step(STEP_US)])
        assert not trace.steps()[0].is_denoise_only


def test_a_range_that_spans_two_steps_is_divided() -> None:
    long = Range(FORWARD, 5_000, 12_000)
    steps = Trace([Range(STEP, i * STEP_US, i * STEP_US) for i in range(3)] + [long])
    assert [step.parts_ms[FORWARD] for step in steps.steps()] == [5, 2]


def test_innermost_gives_every_instant_to_the_call_that_started_last() -> None:
    ranges = [Range("outer", 0, 10), Range("inner", 2, 4), Range("later", 12, 13)]
    assert innermost(ranges) == [
        Piece("outer", 0, 2),
        Piece("inner", 2, 4),
        Piece("outer", 4, 10),
        Piece("later", 12, 13),
    ]
    # Kernels of two streams overlap without nesting.
    crossing = innermost([Range("a", 0, 4), Range("b", 2, 6)])
    assert crossing == [Piece("a", 0, 2), Piece("b", 2, 6)]


def test_overlay_keeps_what_the_upper_pieces_leave_free() -> None:
    upper = [Piece("u", 2, 3), Piece("u", 5, 8)]
    lower = [Piece("l", 0, 6), Piece("l", 7, 9), Piece("l", 10, 11)]
    free = [piece[1:] for piece in overlay(upper, lower) if piece.part == "l"]
    assert free == [(0, 2), (3, 5), (8, 9), (10, 11)]


def cuda_events() -> list[dict[str, object]]:
    """A step of 10 ms on a GPU, in one process, as torch.profiler exports it."""

    def host(name: str, start: float, end: float) -> dict[str, object]:
        event = {"ph": "X", "cat": "user_annotation", "name": PREFIX + name, "pid": 1}
        return event | {"ts": start, "dur": end - start}

    def launch(number: int, start: float) -> dict[str, object]:
        event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1}
        return event | {"ts": start, "dur": 5, "args": {"correlation": number}}

    def kernel(number: int, start: float, end: float) -> dict[str, object]:
        event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0}
        return event | {"ts": start, "dur": end - start, "args": {"correlation": number}}

    return [
        host(STEP, 0, 0),
        host(SCHEDULING, 0, 1_000),
        host(f"{BATCH} 1 256 256", 1_500, 1_500),
        host(FORWARD, 2_000, 3_000),
        launch(1, 2_500),
        kernel(1, 3_000, 8_000),  # runs while the host is in the sampler
        host(SAMPLER, 3_000, 4_000),
        launch(2, 3_500),
        kernel(2, 8_500, 9_500),
        host(STEP, 10_000, 10_000),
        {"ph": "i", "cat": "other", "name": "an instant"},
    ]


def test_kernels_belong_to_the_part_that_launched_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": cuda_events()}, file)
    (step,) = Trace.read(path).steps()
    assert step.parts_ms[FORWARD] == 5  # the kernel, not the launch
    assert step.parts_ms[SAMPLER] == 1
    assert step.parts_ms[SCHEDULING] == 1
    assert step.parts_ms[IDLE] == pytest.approx(3)
    assert sum(step.parts_ms.values()) == pytest.approx(10)


def test_engine_work_that_a_kernel_hides_costs_nothing() -> None:
    events = cuda_events() + [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 600, "args": {"correlation": 1}}
    ]
    trace = Trace()
    for event in events:
        if event["ph"] == "X":
            trace._add(event)
    (step,) = trace.steps()
    assert step.parts_ms[SCHEDULING] == pytest.approx(0.4)


def test_a_trace_without_named_parts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="name the parts before"):
        Trace.read(path)


class Model:
    """Something with functions to name; ``inherited`` is looked up on the class."""

    def inherited(self) -> int:
        return 1

    def schedule(self) -> int:
        return self.inherited()

    def prepare_inputs(self) -> SimpleNamespace:
        return SimpleNamespace(num_reqs=2, num_draft_tokens=64, num_tokens=96)


def test_naming_is_noted_and_can_be_undone() -> None:
    model = Model()
    name_parts(
        [
            Named(model, "inherited", HEAD),
            Named(model, "schedule", SCHEDULING),
            Named(Model, "prepare_inputs", INPUTS),
        ]
    )
    try:
        assert model.schedule() == 1 and model.prepare_inputs().num_reqs == 2
        names = [one.name for one in step_parts.LOG]
        assert names == [STEP, HEAD, SCHEDULING, INPUTS, f"{BATCH} 2 64 96"]
        assert all(one.end_us >= one.start_us for one in step_parts.LOG)
    finally:
        unname_parts()
    step_parts.LOG.clear()
    assert model.schedule() == 1 and model.prepare_inputs().num_reqs == 2
    assert step_parts.LOG == [] and vars(model) == {}


def test_torch_sees_the_same_parts(tmp_path: Path) -> None:
    model = Model()
    name_parts([Named(model, "inherited", HEAD), Named(model, "schedule", SCHEDULING)])
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                model.schedule()
    finally:
        unname_parts()
        step_parts.LOG.clear()
    path = tmp_path / "torch.json"
    profiler.export_chrome_trace(str(path))
    (step,) = Trace.read(path).steps()
    assert step.parts_ms[SCHEDULING] > 0 and step.parts_ms[HEAD] > 0
    assert sum(step.parts_ms.values()) == pytest.approx(step.wall_ms)


def taken(**changes: object) -> Taken:
    """Sixteen steps of a request with a canvas of 32."""
    return replace(Taken(trace_of(16), 150.0, wall_ms=160.0, canvas_rows=32 * 16), **changes)


def test_report_has_a_row_for_every_component(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report("ours", [taken()], 1, coverage=0.9)
    assert [row["component"] for row in rows] == list(GROUPS)
    assert sum(float(str(row["share"])) for row in rows) == pytest.approx(1)
    assert sum(float(str(row["ms_per_step"])) for row in rows) == pytest.approx(10)
    printed = capsys.readouterr().out
    assert "10.000 ms a step" in printed and "1.067" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canvas_rows": 32 * 15}, "512 canvas rows instead of 480"),
        ({"wall_ms": 300.0}, "cover 53% of the 300.0 ms"),
        ({"wall_ms": 150.0}, "cover 106%"),
    ],
)
def test_a_trace_that_the_client_contradicts_gives_no_table(
    changes: dict[str, object], message: str
) -> None:
    assert message in trace_problems(taken(**changes), 0.9)[0]
    with pytest.raises(ValueError, match=message.replace("%", ".")):
        report("ours", [taken(**changes)], 1, coverage=0.9)


def test_unnamed_time_gives_no_table() -> None:
    named = [one for one in trace_of(16).ranges if one.name not in (FORWARD, INPUTS, LOOP)]
    with pytest.raises(ValueError, match=r"the named parts cover 2.% of a step"):
        report("ours", [taken(trace=Trace(named))], 1, coverage=0.9)


def test_a_breakdown_leaves_out_the_extremes() -> None:
    def step(wall: float) -> Step:
        return Step(wall, dict.fromkeys(GROUPS, 0.0) | {FORWARD: wall})

    walls = [1.0] + [10.0] * 8 + [1000.0]
    breakdown = Breakdown.of([step(wall) for wall in walls])
    assert (breakdown.step_ms, breakdown.num_steps) == (10, 8)
    with pytest.raises(ValueError, match="9 denoise steps; at least 10"):
        Breakdown.of([step(1.0)] * 9)


def test_the_environment_chooses_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_DISABLE", "1")  # of the caller's shell
    ours, builtin = (profile_step.environment(name) for name in (OURS, BUILTIN))
    assert "DLLM_DISABLE" not in ours and builtin["DLLM_DISABLE"] == "1"
    assert ours["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and ours["OMP_NUM_THREADS"]


def test_a_real_engine_is_accounted_for(tmp_path: Path) -> None:
    """Every part is heard of, and the parts are the whole.

    How much of the client's waiting they cover depends on who else uses the machine.
    """
    model = Path(__file__).parents[2] / "checkpoints" / "tiny-random"
    arguments = ["--model", str(model), "--mode", "eager", "--concurrency", "2", "--rounds", "1"]
    arguments += ["--blocks", "2", "--coverage", "0", "--results", str(tmp_path)]
    assert profile_step.main(arguments) == 0
    rows = read_csv(tmp_path / "profile_cpu.csv")
    assert list(rows[0])[:4] == ["mode", "server", "concurrency", "component"]
    assert {"commit", "machine", "versions", "command"} <= set(rows[0])
    milliseconds = {row["component"]: float(row["ms_per_step"]) for row in rows}
    assert set(milliseconds) == set(GROUPS) and min(milliseconds.values()) >= 0
    assert sum(milliseconds.values()) == pytest.approx(float(rows[0]["step_ms"]), abs=0.01)
    for part in (SCHEDULING, INPUTS, FORWARD, HEAD, STATISTICS, DECISIONS, SOFT_EMBEDDING, LOOP):
        assert milliseconds[part] > 0, part
