"""bench/profile_step.py: every instant is counted once; steps that are wrong give no table."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import profile_step, step_parts
from bench.context import read_csv
from bench.profile_step import BUILTIN, OURS, check_steps, mean_parts
from bench.step_parts import ENGINE, FORWARD, IDLE, PARTS, Recorder, Step
from tests.support.forced_async import write_plugin


class Model:
    """Functions to name, which let a clock of milliseconds go on; ``forward`` is inherited."""

    now = 0.0

    def forward(self) -> None:
        self.now += 4

    def schedule(self) -> SimpleNamespace:
        self.now += 1
        return SimpleNamespace(scheduled_new_reqs=["new"] if self.now == 1 else [])

    def prepare_inputs(self) -> SimpleNamespace:
        self.now += 2
        return SimpleNamespace(num_reqs=2, num_draft_tokens=64)

    def step(self) -> None:
        self.schedule()
        self.now += 0.5
        self.prepare_inputs()
        self.forward()
        self.now += 0.5


def recorded(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> list[Step]:
    """Of a model whose client takes a quarter of a millisecond behind every step."""
    model = Model()
    named = [(model, "step", ENGINE), (model, "schedule", ENGINE), (model, "forward", FORWARD)]
    named.append((Model, "prepare_inputs", ENGINE))
    clock = SimpleNamespace(perf_counter_ns=lambda: 1e6 * model.now)
    monkeypatch.setattr(step_parts, "time", clock)
    recorder = Recorder()
    with recorder.watching(named):
        for _ in range(num_steps):
            model.step()
            model.now += 0.25
    assert set(vars(model)) == {"now"} and not hasattr(Model.prepare_inputs, "__wrapped__")
    return recorder.steps


def test_the_parts_of_a_step_add_up_to_its_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, last = recorded(monkeypatch, 3)
    expected = {ENGINE: 1 + 2 + 1, FORWARD: 4, IDLE: 0.25}
    for step in (first, second):
        assert {part: value for part, value in step.parts_ms.items() if value} == expected
        assert step.wall_ms == 8.25
        assert step.num_reqs == 2
    assert [step.is_denoise_only for step in (first, second, last)] == [False, True, True]
    assert last.wall_ms == 8  # nobody says when the client comes back


@pytest.mark.parametrize(
    ("wall_ms", "canvas_rows", "message"),
    [
        (160.0, 32 * 15, "512 canvas rows instead of 480"),
        (300.0, 32 * 16, "cover 43% of the 300.0 ms"),
        (100.0, 32 * 16, "cover 128%"),
    ],
)
def test_steps_that_the_client_contradicts_give_no_table(
    wall_ms: float, canvas_rows: int, message: str
) -> None:
    """Sixteen steps of 10 ms, of a request with a canvas of 32; 8 of them in named parts."""
    parts = dict.fromkeys(PARTS, 0.0) | {FORWARD: 6.0, ENGINE: 2.0, IDLE: 2.0}
    steps = [Step(parts, 1, 32, 32) for _ in range(16)]
    check_steps(steps, 160.0, 32 * 16, allowed=(0.8, 1.0))
    with pytest.raises(ValueError, match=message):
        check_steps(steps, wall_ms, canvas_rows, allowed=(0.8, 1.0))


def test_a_server_without_figures_has_a_dash() -> None:
    row = {"server": "ours", "input_len": "64", "start": "0", "step_ms": "5"}
    assert "| 64 | 5 | - | - |" in profile_step.times_behind_prompts([row])


def test_a_mean_leaves_out_the_extremes() -> None:
    def step(wall: float, num_passes: int = 1) -> Step:
        return Step(dict.fromkeys(PARTS, 0.0) | {FORWARD: wall}, num_passes=num_passes)

    walls = [1.0] + [10.0] * 8 + [1000.0]
    assert mean_parts([step(wall) for wall in walls])[FORWARD] == 10
    with pytest.raises(ValueError, match="9 denoise steps; at least 10"):
        mean_parts([step(1.0)] * 9)
    # An engine step of four passes counts for four denoise steps.
    walls_and_passes = [(1.0, 1), *[(10.0, 1)] * 4, *[(20.0, 4)] * 4, (1000.0, 1)]
    assert mean_parts([step(*one) for one in walls_and_passes])[FORWARD] == 120 / 20


ROOT = Path(__file__).parents[2]
SMALL = ("--model", str(ROOT / "checkpoints/tiny-random"), "--concurrency", "2")
SMALL += ("--rounds", "1", "--blocks", "2", "--coverage", "0")
SMALL += ("--llm", '{"enforce_eager": true}')


def test_without_rows_there_is_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> list[dict[str, object]]:
        raise RuntimeError("it did not start")

    monkeypatch.setattr(profile_step, "with_engine", fail)
    assert profile_step.main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == "No table, because:\nit did not start\n"


def test_engines_with_asynchronous_scheduling_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All canvas rows are expected ones; there is no table otherwise."""
    write_plugin(tmp_path / "plugins")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    arguments = [*SMALL, "--server", OURS, BUILTIN, "--results", str(tmp_path)]
    assert profile_step.main(arguments) == 0
    rows = read_csv(tmp_path / "profile_cpu.csv")
    assert {row["server"] for row in rows} == {OURS, BUILTIN}


def test_a_real_engine_is_accounted_for(tmp_path: Path) -> None:
    """Every part is heard of, and the parts are the whole.

    How much of the client's waiting they cover depends on who else uses the machine.
    """
    assert profile_step.main([*SMALL, "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "profile_cpu.csv")
    assert list(rows[0])[:3] == ["server", "concurrency", "input_len"]
    assert {"commit", "machine", "versions", "command"} <= set(rows[0])
    shares = {row["group"]: float(row["share"]) for row in rows}
    assert set(shares) == set(PARTS) and min(shares.values()) >= 0
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4) and float(rows[0]["step_ms"]) > 0
    assert all(share > 0 for part, share in shares.items() if part != IDLE)
