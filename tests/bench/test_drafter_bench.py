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
    PLAIN,
    STOCK_DRAFTS,
    TARGET,
    Pair,
    contestants,
    parse,
    tables,
    write_drafter,
    write_target,
)
from bench.servers import SERVE_FLAGS
from tests.support.drafter_harness import drafting_engine, greedy, watch_drafts

TINY = Pair("tiny-ar", TARGET, DRAFTER, None)
PROMPT = [(21 + 7 * index) % 450 for index in range(40)]
DEPTH = 12


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
    options = parse(["--widths", "3", "7", "--pilot", str(tmp_path)])
    pair = TINY._replace(draft_model=TARGET)
    racing = contestants(options, pair, tmp_path)
    named = {one.name: one.server for one in racing if one.server}
    assert list(named) == [
        *(PLAIN, IN_PROCESS, "fixed 3", "fixed 7", "adaptive", "adaptive, lookup", "pilot"),
        *("n-gram", "draft model"),
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
