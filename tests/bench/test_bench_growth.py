"""bench/scaling.py: fits find the growth they were given, and a point is what it says."""

import random
from pathlib import Path

import pytest

from bench import scaling
from bench.growth import Growth, bends_at, fit
from bench.scaling import BASE, COMPONENTS, Point, first_superlinear, report, sentence, times_of
from bench.step_ranges import DECISIONS, FORWARD, GROUPS, HEAD, IDLE, SCHEDULING
from bench.step_trace import Step

XS = (1, 2, 4, 8, 16, 32, 64)


def rounds(constant: float, factor: float, exponent: float, noise: float) -> list[list[float]]:
    """Seven rounds of a cost that grows so, each value off by a few percent."""
    generator = random.Random(1)
    return [
        [(constant + factor * x**exponent) * generator.gauss(1, noise) for x in XS]
        for _ in range(7)
    ]


@pytest.mark.parametrize(
    ("exponent", "word"), [(0.5, "sublinear"), (1.0, "linear"), (2.0, "superlinear")]
)
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_the_exponent_is_found_beside_a_constant(
    constant: float, exponent: float, word: str
) -> None:
    growth = fit(XS, rounds(constant, 0.3, exponent, noise=0.01))
    assert growth.low <= exponent <= growth.high
    assert growth.exponent == pytest.approx(exponent, abs=0.15)
    assert growth.word == word
    assert growth.at(64) == pytest.approx(constant + 0.3 * 64**exponent, rel=0.05)


def test_a_constant_has_no_exponent() -> None:
    growth = fit(XS, [[2.0] * len(XS)] * 3)
    assert growth.word == "constant" and growth.at(64) == pytest.approx(2)
    assert "constant" in sentence("step", growth, None)


def test_the_bend_is_where_one_more_starts_to_cost_more() -> None:
    bent = [x if x <= 8 else 8 + (x - 8) * 3 for x in XS]
    assert bends_at(XS, [bent, [2 * value for value in bent]]) == 8
    assert bends_at(XS, [bent, list(XS)]) is None  # not in every round
    assert bends_at(XS, [[float(x) for x in XS]]) is None


def test_a_point_differs_from_the_base_on_one_axis() -> None:
    point = Point("canvas", 256)
    assert {axis: point[axis] for axis in BASE} == BASE | {"canvas": 256}
    assert point.model == (256, BASE["vocabulary"])


def test_components_add_up_to_the_step() -> None:
    nothing = dict.fromkeys(GROUPS, 0.0)
    parts = {SCHEDULING: 1.0, FORWARD: 4.0, HEAD: 2.0, DECISIONS: 3.0, IDLE: 0.5}
    times = times_of([Step(10.5, nothing | parts)] * 3)
    assert times == {"step": 10.5, "forward": 4, "head": 2, "sampler": 3, "engine": 1.5}


def test_the_first_superlinear_axis_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def times(x: int) -> dict[str, float]:
        return dict.fromkeys(COMPONENTS, 1.0 + x) | {"step": 1.0 + x * x}

    done = [{Point("canvas", x): times(x) for x in (32, 64, 128, 256)}] * 3
    rows = report("canvas", done)
    assert len(rows) == 2 * 4 * len(COMPONENTS)
    assert first_superlinear(rows).startswith("Superlinear: step against canvas")
    assert "step: superlinear" in capsys.readouterr().out
    linear = [row for row in rows if row["component"] == "head"]
    assert first_superlinear(linear).startswith("Nothing")


def test_two_rounds_give_no_fit(capsys: pytest.CaptureFixture[str]) -> None:
    done = [{Point("canvas", x): dict.fromkeys(COMPONENTS, 1.0) for x in (1, 2, 3, 4)}] * 2
    assert {row["kind"] for row in report("canvas", done)} == {"measured"}
    assert "no fit: 2 rounds" in capsys.readouterr().out


def test_a_growth_says_only_what_its_interval_does() -> None:
    assert Growth(0, 1, 1.4, 0.9, 1.8).word == "undecided"
    assert Growth(0, 1, 1.1, 0.9, 1.3).word == "linear"
    assert Growth(2, 0, 1.4, 0.9, 1.8).word == "constant"
    assert Growth(0, 1, 1.4, 1.1, 1.8).word == "superlinear"
    assert Growth(0, 1, 0.6, 0.4, 0.9).word == "sublinear"


def test_smoke_measures_every_point(tmp_path: Path) -> None:
    """In a process of its own: it wants one thread and names functions of the whole process."""
    import os
    import subprocess
    import sys

    from bench.context import read_csv

    result = subprocess.run(
        [sys.executable, "-m", "bench.scaling", "--smoke", "--results", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = read_csv(tmp_path / "scaling.csv")
    points = {(row["axis"], int(row["value"])) for row in rows}
    assert points == {(axis, x) for axis, xs in scaling.SMOKE_AXES.items() for x in xs}
    assert {row["component"] for row in rows} == set(COMPONENTS)
    assert all(float(row["ms_per_step"]) > 0 for row in rows)
    for row in rows:
        if row["component"] == "step":
            same = [r for r in rows if (r["axis"], r["value"]) == (row["axis"], row["value"])]
            parts = sum(float(r["ms_per_step"]) for r in same if r["component"] != "step")
            assert parts == pytest.approx(float(row["ms_per_step"]), rel=0.25)  # medians of two
