"""What the drafter's benchmark makes of its runs, without servers; the deeper copy of tiny-ar.

The copy gives tiny-ar's logits to the last bit, and its drafter drafts the same.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bench.context import publish, read_csv
from bench.drafter import (
    DRAFTER,
    FILE,
    IN_PROCESS,
    LAYERS,
    MEASURED,
    PLAIN,
    STOCK_DRAFTS,
    TARGET,
    Pair,
    contestants,
    drafting,
    loads,
    pairs,
    parse,
    tables,
    write_drafter,
    write_target,
)
from bench.servers import SERVE_FLAGS
from bench.workloads import MIXED
from dllm.settings.command import CommandError
from dllm.tasks.prompts import SHIPPED, SHIPPED_DOMAINS
from dllm.tasks.suite import FAMILIES
from tests.support.drafter_harness import drafting_engine, greedy, watch_drafts

TINY = Pair("tiny-ar", TARGET, DRAFTER, None)
PROMPT = [(21 + 7 * index) % 450 for index in range(40)]
DEPTH = 12


def num_layers_of(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


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


def test_the_page_shows_mixed_questions_and_the_csv_all(tmp_path: Path) -> None:
    runs = [run(PLAIN, 0, 100), run("adaptive", 0, 250)]
    mixed = [row | {"family": MIXED, "concurrency": 1} for row in runs]
    publish(tmp_path / FILE, [*runs, *mixed])
    shown = drafting(tmp_path)
    assert f"| tiny-ar | {MIXED} | 1 |" in shown and "edit" not in shown
    assert "| edit |" in tables(read_csv(tmp_path / FILE))


def test_loads() -> None:
    asked = loads(parse(["--families", "edit"]), TARGET)
    found = [(load.family, load.concurrency, load.num_requests) for load in asked]
    assert found == [(MIXED, 1, 32), (MIXED, 8, 32), (MIXED, 32, 64), ("edit", 1, 32)]
    assert asked[0].families == tuple(FAMILIES)
    alone = [load.family for load in loads(parse(["--concurrency", "1"]), TARGET)]
    assert alone == [MIXED, *MEASURED]


def test_another_model_is_asked_the_prompts_of_a_file(tmp_path: Path) -> None:
    """``tmp_path`` has no tokenizer of ours."""
    (mixed, one) = loads(parse(["--families", "chat", "--concurrency", "1"]), tmp_path)
    assert mixed.prompts == SHIPPED and len(mixed.families) == SHIPPED_DOMAINS
    assert (one.family, one.asked(0)) == ("chat", ())
    with pytest.raises(CommandError, match="edit"):
        loads(parse(["--families", "edit"]), tmp_path)


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
    pair = TINY._replace(draft_model=TARGET)
    racing = contestants(options, pair, tmp_path)
    named = {one.name: one.server for one in racing if one.server}
    assert list(named) == [
        *(PLAIN, IN_PROCESS, "fixed 3", "fixed 7", "adaptive", "pilot", "n-gram", "draft model")
    ]
    assert all(one.flags[: len(SERVE_FLAGS)] == SERVE_FLAGS for one in named.values())
    assert named[IN_PROCESS].flags[-1].endswith(".UniProcExecutor")
    config = json.loads(named["adaptive"].flags[-3])
    assert (config["num_speculative_tokens"], config["model"]) == (7, str(DRAFTER))
    assert '"policy": "adaptive"' in named["adaptive"].flags[-1]
    assert str(tmp_path) in named["pilot"].flags[-1]
    stock = {name for name, one in named.items() if one.environment == {"DLLM_DISABLE": "1"}}
    assert stock == {"n-gram", "draft model"}
    assert json.loads(named["n-gram"].flags[-1])["num_speculative_tokens"] == STOCK_DRAFTS
    own = contestants(parse([]), TINY, tmp_path)
    assert not {"pilot", "draft model"} & {one.name for one in own}


# --- the deeper copy -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deeper")
    write_target(out / "target", DEPTH)
    write_drafter(out / "drafter", DEPTH)
    return out


def logits(model: Path, dtype: torch.dtype) -> torch.Tensor:
    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        return loaded(torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal_to_the_last_bit(deeper: Path, dtype: torch.dtype) -> None:
    found = logits(deeper / "target", dtype)
    assert torch.equal(found, logits(TARGET, dtype))
    assert found.argmax(-1).unique().numel() > 3  # not one token everywhere


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_engine_tokens_and_drafts_are_the_same(deeper: Path, dtype: str) -> None:
    runs = []
    for target, drafter in ((TARGET, DRAFTER), (deeper / "target", deeper / "drafter")):
        engine = drafting_engine(target, drafter, 7, dtype=dtype)
        with watch_drafts(engine) as seen:
            tokens = engine.generate([PROMPT], greedy(40))
        runs.append((tokens, seen))
    (tokens, drafts), (tokens_deeper, drafts_deeper) = runs
    assert tokens_deeper == tokens
    assert len(drafts_deeper) == len(drafts) < 40
    for one, other in zip(drafts, drafts_deeper, strict=True):
        assert (one.tokens, one.drafts) == (other.tokens, other.drafts)
        assert torch.equal(one.logits, other.logits)


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    write_target(tmp_path / "target", 2)
    kept = Qwen3ForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    whole = Qwen3ForCausalLM.from_pretrained(TARGET).state_dict()
    assert {name for name in whole if "layers." in name and name.split(".")[2] in "01"} < set(kept)
    assert all(torch.equal(one, whole[name]) for name, one in kept.items())
