"""What the drafter's benchmark makes of its runs. No servers."""

from dataclasses import replace

import pytest

from bench.context import as_text, read_csv, write_csv
from bench.drafter import (
    FILE,
    PLAIN,
    SHAPE,
    as_right_as_plain,
    contestants,
    drafting,
    loads,
    parse,
    speculate,
    table,
)
from bench.measure import NO_CANVAS, Measurement, csv_rows, measurement
from bench.servers import SERVE_FLAGS
from bench.tables import markdown
from bench.workloads import ADAPTIVE, MIXED, Workload
from dllm.tasks.suite import FAMILIES

LOAD = Workload(ADAPTIVE, 2, SHAPE, 8, families=("edit",))


def run(
    name: str, pair: int, tokens_per_s: float, accepted: int = 0, steps: int = 0
) -> Measurement:
    saved = {
        "completed": 2,
        "failed": 0,
        "duration": 1.0,
        "output_throughput": tokens_per_s,
        "output_lens": [10, 12],
        "ttfts": [0.1, 0.2],
        "latencies": [0.2, 0.3],
        "spec_decode_num_drafts": steps,
        "spec_decode_accepted_tokens": accepted,
    }
    return measurement(name, pair, NO_CANVAS, saved, LOAD)


def test_ratios_are_taken_round_by_round_and_tokens_per_verifying_step(tmp_path):
    runs = [run(PLAIN, 0, 100), run("adaptive", 0, 250, accepted=30, steps=10)]
    runs += [run("adaptive", 1, 150, accepted=10, steps=10), run(PLAIN, 1, 50)]
    assert "Not measured" in drafting(tmp_path)
    about = {"commit": "abc", "machine": "a machine", "versions": "vllm 0", "command": "python x"}
    rows = csv_rows([(LOAD, one) for one in runs], about)
    write_csv(tmp_path / FILE, [{"family": LOAD.family} | row for row in rows])
    text = markdown(table(read_csv(tmp_path / FILE)))
    assert text in drafting(tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("| edit"))
    assert line == "| edit | 8 | 75 | 2.75 [2.50 .. 3.00] · 3.0 |"
    assert runs[1].acceptance_length == 4.0 and runs[0].acceptance_length is None
    assert as_text(rows)[0]["acceptance_length"] == ""


def test_contestants(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    given = ["--target", str(tmp_path), "--drafter", str(tmp_path), "--widths", "3", "7"]
    options = parse([*given, "--pilot", str(tmp_path), "--families", "edit"])
    asked = loads(options)
    assert [(load.family, load.concurrency) for load in asked] == [
        (family, n) for family in (MIXED, "edit") for n in (1, 8, 32)
    ]
    assert {load.num_requests for load in asked} == {96}
    assert asked[0].families == tuple(FAMILIES)
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
    load = replace(LOAD, num_requests=100)

    def right(name: str, num_correct: int) -> tuple[Workload, Measurement]:
        one = run(name, 0, 5.0)
        return load, replace(one, num_requests=100, num_correct=num_correct)

    turn = [right("fixed 7", 60), right(PLAIN, 90), right("adaptive", 88), right("pilot", 99)]
    found = {one.contestant: one for _, one in as_right_as_plain(turn)}
    worse = found.pop("fixed 7")
    assert worse.tokens_per_s is None and "plain decoding got right 90.0 %" in worse.problem
    assert [one.tokens_per_s for one in found.values()] == [5.0] * 3
