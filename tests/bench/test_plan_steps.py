"""The planned steps of the benchmark, its table, and answers that differ."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench import plan_steps
from bench.context import GateError, as_text
from bench.plan_steps import DRAFT_MS, MOST
from bench.remote import KNOWN, KNOWN_AHEAD


@pytest.mark.parametrize("width", [2, MOST])
def test_the_plan_adds_drafting_and_the_round_trip(width):
    assert plan_steps.planned(60.0, width, False) == pytest.approx(60.1 + width * DRAFT_MS)


def test_running_ahead_hides_what_fits_into_a_step():
    assert plan_steps.planned(60.0, 8, True) == pytest.approx(60.1)
    # Nine drafts take 54 ms, of which 20.1 pass while the target verifies.
    assert plan_steps.planned(20.0, 8, True) == pytest.approx(9 * DRAFT_MS)


def test_every_worker_and_width_is_measured_and_other_answers_end_it(monkeypatch):
    runs = iter(range(100))
    monkeypatch.setattr(plan_steps, "steps", lambda *_: ([[1, 2]], [50.0 + next(runs)]))
    workers = dict.fromkeys((KNOWN, KNOWN_AHEAD), SimpleNamespace(address="here"))
    target = SimpleNamespace(drafted_by=lambda contestant, address: nullcontext())
    rows = plan_steps.measure(target, workers, [[1]], [[1, 2]], 1, 0)
    assert [(row["drafts"], row["width"]) for row in rows] == [
        (name, width) for name in (KNOWN, KNOWN_AHEAD) for width in plan_steps.WIDTHS
    ]
    assert rows[0]["measured_ms"] == 51.0
    assert rows[0]["planned_ms"] == pytest.approx(50.0 + 0.1 + 2 * DRAFT_MS)
    with pytest.raises(GateError, match="known, 2: answers differ"):
        plan_steps.measure(target, workers, [[1]], [[1, 3]], 1, 0)


def test_the_table_says_by_how_much_they_differ():
    rows = [
        {"concurrency": 4, "drafts": KNOWN, "width": 2, "planned_ms": 100.0, "measured_ms": ms}
        for ms in (99.0, 102.0, 110.0)
    ]
    _, lines = plan_steps.table(as_text(rows))
    assert lines == [
        [
            "4 at once",
            "known, K = 2",
            "100.0 [100.0 .. 100.0]",
            "102.0 [99.0 .. 110.0]",
            "2.0 [-1.0 .. 10.0]",
        ]
    ]
