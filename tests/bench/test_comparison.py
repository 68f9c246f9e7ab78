"""README's table: ours divided by the other's, round by round, from the CSV files."""

from pathlib import Path

import pytest

from bench import readme
from bench.context import write_csv
from bench.serve import BUILTIN, OURS, PIPELINE

ABOUT = {"machine": "a machine", "versions": "vllm 0"}
SERVING = {"schedule": "adaptive", "commit": "aaa1111"}
FAMILIES = {"canvas_length": 32, "commit": "bbb2222"}
DRAFTER = {"target": "tiny-ar", "family": "mixed", "commit": "ccc3333"}


def runs(about: dict, load: int, contestant: str, *speeds: float) -> list[dict]:
    return [
        {"contestant": contestant, "concurrency": load, "pair": pair, "tokens_per_s": speed}
        | about
        | ABOUT
        for pair, speed in enumerate(speeds)
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    serving = runs(SERVING, 1, OURS, 300, 200) + runs(SERVING, 1, BUILTIN, 100, 100)
    serving += runs(SERVING, 32, OURS, 100) + runs(SERVING, 32, BUILTIN, 200)
    serving += runs(SERVING | {"schedule": "fixed"}, 1, BUILTIN, 1, 1)  # random tokens: left out
    write_csv(tmp_path / readme.SERVING, serving)
    settings = runs(SERVING, 32, OURS, 110) + runs(SERVING, 32, f"{BUILTIN} --max-num-seqs 64", 100)
    write_csv(tmp_path / readme.SETTINGS, settings)
    blocks = runs(FAMILIES, 1, OURS, 90) + runs(FAMILIES, 1, PIPELINE, 30)
    write_csv(tmp_path / readme.FAMILIES, blocks)
    drafting = runs(DRAFTER, 1, "adaptive", 90) + runs(DRAFTER, 1, "n-gram", 100)
    drafting += runs(DRAFTER | {"target": "inflated"}, 1, "n-gram", 1)
    write_csv(tmp_path / readme.DRAFTER, drafting)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "| vLLM's built-in DiffusionGemma | 2.50 [2.00 .. 3.00] | - | 0.50 [0.50 .. 0.50] "
        "| [aaa1111](bench/results/serve_compiled.csv) |",
        "(default: 8) | - | - | 1.10 [1.10 .. 1.10] | [aaa1111](bench/results/serve_settings.csv)",
        "SDAR, blocks of 32 tokens | diffusers' pipeline | 3.00 [3.00 .. 3.00] | - | - | [bbb2222]",
        "SDAR, blocks of 4 tokens | diffusers' pipeline | - | - | - |",
        "| vLLM's n-gram drafts | 0.90 [0.90 .. 0.90] | - | - | [ccc3333]",
    ],
)
def test_wins_and_losses_stand_side_by_side(line: str, results: Path) -> None:
    assert line in readme.comparison(results)
    assert readme.comparison(results).endswith("\n\na machine, vllm 0.")
