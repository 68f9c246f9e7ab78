"""What the drafter's benchmark makes of its runs, without servers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.benchmarks.datasets import datasets

from bench.context import publish, read_csv
from bench.drafter import (
    DRAFTER,
    FILE,
    IN_PROCESS,
    PLAIN,
    STOCK_DRAFTS,
    TARGET,
    contestants,
    loads,
    parse,
    tables,
)
from bench.runs import keep_long_prompts
from bench.servers import SERVE_FLAGS
from bench.workloads import ANSWER_TOKENS
from tests.support.drafter_pairs import give_byte_tokenizer, write_target


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
    stock = {name for name, one in named.items() if one.environment == {"DLLM_DISABLE": "1"}}
    assert stock == {"n-gram"}
    assert json.loads(named["n-gram"].flags[-1])["num_speculative_tokens"] == STOCK_DRAFTS


def test_a_small_model_and_windows_are_measured_if_asked_for(tmp_path: Path) -> None:
    asked = ["--widths", "3", "7", "--windows", "64", "--draft-model", str(TARGET)]
    racing = contestants(parse(asked), tmp_path)
    flags = {one.name: one.server.flags[-4:] for one in racing if one.server}

    def given(name: str) -> list[dict[str, object]]:
        return [json.loads(flags[name][place]) for place in (1, 3)]

    speculative, ours = given("fixed 7, window 64")
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("dflash", 7)
    assert ours == {"dllm": {"drafter": {"window": 64}}}
    small = {"method": "draft_model", "model": str(TARGET), "num_speculative_tokens": STOCK_DRAFTS}
    for name, policy in (("draft model", "fixed"), ("draft model, adaptive", "adaptive")):
        assert given(name) == [small, {"dllm": {"drafter": {"policy": policy}}}]


def test_questions_stand_behind_pages_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many tokens of them, and none is left out for its length."""
    target = give_byte_tokenizer(write_target(tmp_path / "target"))
    asked = ["--target", str(target), "--concurrency", "1", "--num-requests", "12"]
    options = parse([*asked, "--contexts", "64", "3000"])
    assert int(options.serve_flags[-1]) > 3000 + ANSWER_TOKENS
    tokenizer = AutoTokenizer.from_pretrained(target)
    monkeypatch.setattr(datasets, "is_valid_sequence", datasets.is_valid_sequence)
    keep_long_prompts()
    for load, length in zip(loads(options), options.contexts, strict=True):
        assert load.family == f"mixed behind {length} tokens"
        file = tmp_path / f"{length}.json"
        replace(load, context=None).client_flags(1, tmp_path / "alone.json")
        load.client_flags(1, file)
        alone, behind = (
            [each["conversations"][0]["value"] for each in json.loads(path.read_text())]
            for path in (tmp_path / "alone.json", file)
        )
        pages = [
            text.removesuffix(f"\n\n{question}")
            for text, question in zip(behind, alone, strict=True)
        ]
        # A character of several bytes may be cut.
        assert all(abs(len(tokenizer(page).input_ids) - length) <= 2 for page in pages)
        assert len({page[:20] for page in pages}) == 12
        client = datasets.ShareGPTDataset(random_seed=0, dataset_path=str(file))
        sent = client.sample(tokenizer, 12, output_len=ANSWER_TOKENS, no_oversample=True)
        assert len(sent) == 12
    with pytest.raises(SystemExit):
        parse(["--contexts", "64"])  # tiny-ar
