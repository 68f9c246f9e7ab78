"""The race of the families with blocks: all give the same tokens, and the table holds ratios."""

import pytest

from bench import families
from bench.context import GateError, as_text
from bench.families import FUSED, PIPELINE, SEPARATE, Run


def reverse(prompts, concurrency):
    return [list(reversed(prompt)) for prompt in prompts]


def test_everybody_runs_in_every_round_and_the_pipeline_serves_one_at_a_time():
    contestants = {FUSED: reverse, SEPARATE: reverse, PIPELINE: reverse}
    runs = families.race(contestants, 4, 1, 2, 100)
    order = [FUSED, SEPARATE, PIPELINE, SEPARATE, PIPELINE, FUSED]
    assert [(run.contestant, run.pair) for run in runs] == list(
        zip(order, (0, 0, 0, 1, 1, 1), strict=True)
    )
    together = families.race(contestants, 4, 2, 1, 100)
    assert [run.contestant for run in together] == [FUSED, SEPARATE]
    assert {run.num_requests for run in together} == {16}


def test_other_tokens_end_the_race():
    contestants = {FUSED: reverse, SEPARATE: lambda prompts, _: [list(each) for each in prompts]}
    with pytest.raises(GateError, match="separate commit generated other tokens"):
        families.race(contestants, 4, 1, 1, 100)


def test_without_diffusers_nothing_is_started(monkeypatch, capsys):
    monkeypatch.setattr(families.pipeline, "is_installed", lambda: False)
    monkeypatch.setattr(families, "serve", lambda *_: pytest.fail("a server was started"))
    assert families.main([]) == 2
    assert capsys.readouterr().err.startswith("needs diffusers in ")


def test_the_table_has_ratios_of_the_same_round():
    speeds = {FUSED: (300.0, 600.0), SEPARATE: (200.0, 300.0), PIPELINE: (100.0, 100.0)}
    runs = [
        Run(name, 32, 1, pair, 4, speed)
        for name, both in speeds.items()
        for pair, speed in enumerate(both)
    ]
    runs.append(Run(FUSED, 32, 8, 0, 32, 900.0))
    runs.append(Run(FUSED, 4, 8, 0, 32, 500.0))
    _, lines = families.table(as_text([vars(run) for run in runs]))
    assert lines == [
        ["B = 32, 1 at once", "450 [300 .. 600]", "1.75 [1.50 .. 2.00]", "4.50 [3.00 .. 6.00]"],
        ["B = 32, 8 at once", "900 [900 .. 900]", "-", "-"],
        ["B = 4, 8 at once", "500 [500 .. 500]", "-", "-"],
    ]
