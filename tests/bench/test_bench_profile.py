"""bench/profile.py: every instant belongs to one part, and engines are asked for what they say."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import profile
from bench.context import ROOT, read_csv
from bench.profile import BUILTIN, ENGINE, FORWARD, HEAD, OURS, PARTS, SAMPLER, shares_of


def event(name: str, ms: float, parent: SimpleNamespace | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, cpu_time_total=ms, cpu_parent=parent)


def test_a_part_has_no_time_of_the_parts_that_it_calls() -> None:
    """Operations between a part and its caller belong to neither's account of the other."""
    step = event(ENGINE, 100)
    operation = event("aten::mm", 60, step)
    sampler = event(SAMPLER, 50, operation)
    inside = [event(HEAD, 10, sampler), event(FORWARD, 20, event("aten::add", 21, sampler))]
    found = shares_of([step, operation, sampler, *inside, event("aten::mul", 5)])
    assert found == {ENGINE: 0.5, FORWARD: 0.2, HEAD: 0.1, SAMPLER: 0.2}


def test_starts_are_compared_pair_by_pair() -> None:
    def start(server: str, ms: str) -> dict[str, str]:
        return {"server": server, "input_len": "64", "step_ms": ms}

    both = [start(OURS, "5"), start(BUILTIN, "10"), start(OURS, "4"), start(BUILTIN, "12")]
    shown = profile.behind_prompts(both)
    assert "| 64 | 4 [4 .. 5] | 11 [10 .. 12] | 2.50 [2.00 .. 3.00] |" in shown
    assert "| 64 | 5 | - | - |" in profile.behind_prompts(both[:1])


def test_engines_are_timed_part_by_part(tmp_path: Path) -> None:
    arguments = ["--model", str(ROOT / "checkpoints/tiny-dllm"), "--concurrency", "2"]
    arguments += ["--rounds", "1", "--blocks", "2", "--llm", '{"enforce_eager": true}']
    assert profile.main([*arguments, "--server", OURS, BUILTIN, "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / profile.STEP_TIME.file)
    assert [row["server"] for row in rows] == [OURS, BUILTIN]
    assert {"commit", "machine", "versions", "command"} <= set(rows[0])
    for row in rows:
        shares = [float(row[part]) for part in PARTS]
        assert min(shares) > 0 and sum(shares) == pytest.approx(1, abs=1e-4)
        assert float(row["step_ms"]) > 0
