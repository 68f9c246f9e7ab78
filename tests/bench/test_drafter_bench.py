"""What the drafter's benchmark makes of its runs. No servers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.context import as_text, read_csv, write_csv
from bench.drafter import (
    FILE,
    IN_PROCESS,
    MEASURED,
    PLAIN,
    SHAPE,
    STOCK_DRAFTS,
    Pair,
    as_right_as_plain,
    contestants,
    drafting,
    loads,
    pairs,
    parse,
    rows_of,
    sections,
    speeds,
)
from bench.inflate import DRAFTER, LAYERS, TARGET, num_layers_of
from bench.measure import NO_CANVAS, Measurement, measurement
from bench.servers import SERVE_FLAGS
from bench.tables import markdown
from bench.workloads import ADAPTIVE, MIXED, Workload
from dllm.tasks.suite import FAMILIES

LOAD = Workload(ADAPTIVE, 2, SHAPE, 8, families=("edit",))
ALONE = replace(LOAD, concurrency=1, families=tuple(FAMILIES))
ABOUT = {"commit": "abc", "machine": "a machine", "versions": "vllm 0", "command": "python x"}
TINY = Pair("tiny-ar", TARGET, DRAFTER, None)


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


def rows(load: Workload, runs: list[Measurement]) -> list[dict[str, str]]:
    return as_text(rows_of(TINY, [(load, one) for one in runs], ABOUT))


def test_ratios_are_taken_round_by_round_and_tokens_per_verifying_step(tmp_path: Path) -> None:
    runs = [run(PLAIN, 0, 100), run("adaptive", 0, 250, accepted=30, steps=10)]
    runs += [run("adaptive", 1, 150, accepted=10, steps=10), run(PLAIN, 1, 50)]
    runs += [run(IN_PROCESS, 0, 125), run(IN_PROCESS, 1, 100)]
    line = markdown(speeds(rows(LOAD, runs))).splitlines()[-1]
    assert line == (
        "| tiny-ar | edit | 8 | 75 | 2.75 [2.50 .. 3.00] (1.75) · 3.0 | 1.62 [1.25 .. 2.00] |"
    )
    assert runs[1].acceptance_length == 4.0 and runs[0].acceptance_length is None


def test_the_page_shows_mixed_questions_and_the_csv_all(tmp_path: Path) -> None:
    assert "Not measured" in drafting(tmp_path)
    runs = [run(PLAIN, 0, 100), run(IN_PROCESS, 0, 90), run("adaptive", 0, 250, 30, 10)]
    found = rows(ALONE, runs)
    path = tmp_path / FILE
    write_csv(path, [*found, *rows(LOAD, runs)])
    assert markdown(speeds(found)) in drafting(tmp_path) and "edit" not in drafting(tmp_path)
    assert "| edit |" in sections(read_csv(path))


def test_loads() -> None:
    asked = loads(parse(["--families", "edit"]))
    found = [(load.family, load.concurrency, load.num_requests) for load in asked]
    assert found == [(MIXED, 1, 32), (MIXED, 8, 32), (MIXED, 32, 64), ("edit", 1, 32)]
    assert asked[0].families == tuple(FAMILIES)
    assert parse([]).families == MEASURED


def test_pairs(tmp_path: Path) -> None:
    tiny, deeper = pairs(parse([]), tmp_path)
    assert (tiny.target, tiny.drafter, tiny.name) == (TARGET, DRAFTER, "tiny-ar")
    assert num_layers_of(deeper.target) == LAYERS
    assert tiny.draft_model == deeper.draft_model is not None
    assert num_layers_of(tiny.draft_model) < num_layers_of(TARGET)
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (pair,) = pairs(parse(["--target", str(own)]), tmp_path)
    assert (pair.target, pair.draft_model) == (own, None)
    with pytest.raises(SystemExit):
        parse(["--target", str(tmp_path / "none")])


def test_who_is_measured(tmp_path: Path) -> None:
    options = parse(["--widths", "3", "7", "--pilot", str(tmp_path)])
    pair = replace(TINY, draft_model=TARGET)
    racing = contestants(options, pair, tmp_path)
    named = {one.name: one.server.options for one in racing if one.server}
    assert list(named) == [
        *(PLAIN, IN_PROCESS, "fixed 3", "fixed 7", "adaptive", "pilot", "n-gram", "draft model")
    ]
    assert all(one.flags[: len(SERVE_FLAGS)] == SERVE_FLAGS for one in named.values())
    assert named[IN_PROCESS].flags[-1].endswith(".UniProcExecutor")
    config = json.loads(named["adaptive"].flags[-3])
    assert (config["num_speculative_tokens"], config["model"]) == (7, str(DRAFTER))
    assert '"policy": "adaptive"' in named["adaptive"].flags[-1]
    assert str(tmp_path) in named["pilot"].flags[-1]
    stock = {name for name, one in named.items() if one.environment == (("DLLM_DISABLE", "1"),)}
    assert stock == {"n-gram", "draft model"}
    assert json.loads(named["n-gram"].flags[-1])["num_speculative_tokens"] == STOCK_DRAFTS
    own = contestants(parse([]), replace(pair, draft_model=None), tmp_path)
    assert not {"pilot", "draft model"} & {one.name for one in own}


def test_a_run_that_is_right_less_often_than_plain_decoding_has_no_speed() -> None:
    load = replace(LOAD, num_requests=100)

    def right(name: str, num_correct: int) -> tuple[Workload, Measurement]:
        one = run(name, 0, 5.0)
        return load, replace(one, num_requests=100, num_correct=num_correct)

    turn = [right("fixed 7", 60), right(PLAIN, 90), right("adaptive", 88), right("pilot", 99)]
    found = {one.contestant: one for _, one in as_right_as_plain(turn)}
    worse = found.pop("fixed 7")
    assert worse.tokens_per_s is None and "plain decoding got right 90.0 %" in worse.problem
    assert [one.tokens_per_s for one in found.values()] == [5.0] * 3
