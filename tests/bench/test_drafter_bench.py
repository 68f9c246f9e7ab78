"""What the drafter's benchmark makes of its runs. No servers."""

from dataclasses import replace

import pytest

from bench.command import SERVE_FLAGS
from bench.context import read_csv, write_csv
from bench.drafter import (
    SHAPE,
    Load,
    Run,
    as_right_as_plain,
    contestants,
    parse,
    row,
    speculate,
)
from bench.drafter_report import FILE, MIXED, PLAIN, drafting, tables
from bench.measure import NO_CANVAS, Circumstances, measurement
from bench.workloads import ADAPTIVE, QUESTIONS, Workload
from dllm.tasks.suite import FAMILIES

LOAD = Load("edit", 8, 2)


def run(name: str, pair: int, tokens_per_s: float, accepted: int = 0, steps: int = 0) -> Run:
    saved = {
        "completed": 2,
        "failed": 0,
        "duration": 1.0,
        "output_throughput": tokens_per_s,
        "output_lens": [10, 12],
        "ttfts": [0.1, 0.2],
        "latencies": [0.2, 0.3],
    }
    workload = Workload(ADAPTIVE, QUESTIONS, 2, SHAPE, 8)
    measured = measurement(Circumstances(name, pair, 0), NO_CANVAS, saved, workload)
    return Run(LOAD, measured, 7 * steps, 5 * steps, accepted, steps, 0.5)


def test_ratios_are_taken_round_by_round_and_tokens_per_verifying_step(tmp_path):
    runs = [run(PLAIN, 0, 100), run("adaptive", 0, 250, accepted=30, steps=10)]
    runs += [run("adaptive", 1, 150, accepted=10, steps=10), run(PLAIN, 1, 50)]
    assert "Not measured" in drafting(tmp_path)
    about = {"commit": "abc", "machine": "a machine", "versions": "vllm 0", "command": "python x"}
    write_csv(tmp_path / FILE, [row(one) | about for one in runs])
    text = tables(read_csv(tmp_path / FILE))
    assert text in drafting(tmp_path)
    assert "| adaptive | 44 | 140 | 100 | 40 | 1 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| edit"))
    assert line == "| edit | 8 | 75 | 2.75 [2.50 .. 3.00] · 3.0 |"
    assert row(runs[1])["acceptance_length"] == 4.0
    assert row(runs[0])["acceptance_length"] is None
    assert (row(runs[1])["drafted"], row(runs[1])["verified"]) == (70, 50)


def test_loads_are_questions_of_one_family_or_of_all():
    assert {one.family for one in LOAD.draw(0)} == {"edit"}
    mixed = Load(MIXED, 1, len(FAMILIES)).draw(0)
    assert {one.family for one in mixed} == set(FAMILIES)
    assert LOAD.draw(0) == LOAD.draw(0) != LOAD.draw(1)


def test_contestants(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    given = ["--target", str(tmp_path), "--drafter", str(tmp_path), "--widths", "3", "7"]
    options = parse([*given, "--pilot", str(tmp_path), "--families", "edit"])
    assert [(load.family, load.num_requests) for load in options.loads[:3]] == [
        (MIXED, 96),
        (MIXED, 96),
        (MIXED, 96),
    ]
    named = {one.name: one.server.options.flags for one in contestants(options, tmp_path)}
    in_process = f"{PLAIN}, in process"
    assert list(named) == [PLAIN, in_process, "fixed 3", "fixed 7", "adaptive", "pilot"]
    assert named[in_process][-1].endswith(".UniProcExecutor") and named[PLAIN] == SERVE_FLAGS
    assert named["fixed 3"][-2:] == speculate(options, 3, {})
    assert '"num_speculative_tokens": 7' in " ".join(named["adaptive"])
    assert '"policy": "adaptive"' in named["adaptive"][-1]
    assert str(tmp_path) in named["pilot"][-1]
    with pytest.raises(SystemExit):
        parse(["--target", str(tmp_path / "none")])


def test_a_run_that_is_right_less_often_than_plain_decoding_has_no_speed():
    def right(name: str, num_correct: int) -> Run:
        one = run(name, 0, 5.0)
        measured = replace(one.measured, num_correct=num_correct)
        return replace(one, load=Load(MIXED, 1, 100), measured=measured)

    turn = [right("fixed 7", 60), right(PLAIN, 90), right("adaptive", 88), right("pilot", 99)]
    found = {one.measured.contestant: one.measured for one in as_right_as_plain(turn)}
    worse = found.pop("fixed 7")
    assert worse.tokens_per_s is None and "plain decoding got right 90.0 %" in worse.problem
    assert [one.tokens_per_s for one in found.values()] == [5.0] * 3
