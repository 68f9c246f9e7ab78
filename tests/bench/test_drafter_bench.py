"""What the drafter's benchmark makes of its runs, without servers."""

import json
from pathlib import Path

from bench.context import publish, read_csv
from bench.drafter import (
    DRAFTER,
    FILE,
    IN_PROCESS,
    PLAIN,
    STOCK_DRAFTS,
    TARGET,
    contestants,
    parse,
    tables,
)
from bench.servers import SERVE_FLAGS


def run(name: str, pair: int, speed: float, length: float | None = None, **load: object) -> dict:
    load = {"target": "tiny-ar", "family": "edit", "concurrency": 8, "problem": ""} | load
    figures = {"tokens_per_s": speed, "acceptance_length": length}
    return {"contestant": name, "pair": pair, **load, **figures}


def test_ratios_are_taken_round_by_round(tmp_path: Path) -> None:
    runs = [run(PLAIN, 0, 100), run("adaptive", 0, 250, 4.0)]
    runs += [run("adaptive", 1, 150, 2.0), run(PLAIN, 1, 50)]
    runs += [run(IN_PROCESS, 0, 125), run(IN_PROCESS, 1, 100)]
    publish(tmp_path / FILE, runs)
    assert (
        "| tiny-ar | edit | 8 | 75 | 2.75 [2.50 .. 3.00] (1.75) · 3.0 | 1.62 [1.25 .. 2.00] |"
        in tables(read_csv(tmp_path / FILE))
    )


def test_who_is_measured(tmp_path: Path) -> None:
    racing = contestants(parse(["--widths", "3", "7"]), tmp_path)
    named = {one.name: one.server for one in racing if one.server}
    ours = "fixed 3", "fixed 7", "adaptive", "adaptive, lookup"
    assert list(named) == [PLAIN, IN_PROCESS, *ours, "lookup", "n-gram"]
    assert all(one.flags[: len(SERVE_FLAGS)] == SERVE_FLAGS for one in named.values())
    assert named[IN_PROCESS].flags[-1].endswith(".UniProcExecutor")
    config = json.loads(named["adaptive"].flags[-3])
    assert (config["num_speculative_tokens"], config["model"]) == (7, str(DRAFTER))
    assert '"policy": "adaptive"' in named["adaptive"].flags[-1]
    stock = {name for name, one in named.items() if "DLLM_DISABLE" in one.environment}
    assert stock == {"n-gram"}
    assert json.loads(named["n-gram"].flags[-1])["num_speculative_tokens"] == STOCK_DRAFTS


def test_other_sources_are_measured_if_asked_for(tmp_path: Path) -> None:
    racing = contestants(parse(["--draft-model", str(TARGET), "--adapter", "x", "8"]), tmp_path)
    flags = {one.name: one.server.flags[-4:] for one in racing if one.server}
    small = {"method": "draft_model", "model": str(TARGET), "num_speculative_tokens": STOCK_DRAFTS}
    own = {"method": "uno", "uno_lora_path": "x", "num_speculative_tokens": 8}
    for name, source, policy in (
        ("draft model", small, "fixed"),
        ("draft model, adaptive", small, "adaptive"),
        ("itself", own, "fixed"),
    ):
        given = [json.loads(flags[name][place]) for place in (1, 3)]
        assert given == [source, {"dllm": {"drafter": {"policy": policy}}}]
