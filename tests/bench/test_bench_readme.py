"""Pages and CSV files agree; what each section makes of its file."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench import readme
from bench.context import ROOT, write_csv
from bench.readme import options_table
from bench.runs import FIGURES
from bench.serve import BUILTIN, OURS, PIPELINE
from dllm.settings.remote import RemoteOptions

ABOUT = {
    "commit": "abc1234",
    "machine": "a machine",
    "versions": "vllm 0",
    "command": "python -m bench.serve",
}
QUESTIONS = {"schedule": "adaptive", "concurrency": 8, "rate": None, "pair": 0} | ABOUT
RUN: dict[str, Any] = QUESTIONS | dict.fromkeys(FIGURES) | {"num_requests": 40, "num_correct": 36}
RUN |= {"contestant": OURS, "tokens_per_s": 300.0, "problem": ""}
THEIRS = RUN | {"contestant": BUILTIN, "tokens_per_s": 100.0}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A CSV of servers."""
    slower = {"concurrency": None, "rate": 4.0}
    rows = [RUN, THEIRS, RUN | slower, THEIRS | slower]
    write_csv(tmp_path / "serve_compiled.csv", rows)
    return tmp_path


# --- README --------------------------------------------------------------------------------------


def test_our_pages_agree_with_the_csv_files() -> None:
    pages = readme.pages(ROOT)
    assert {"README.md", "benchmarks.md"} <= {page.name for page in pages}
    assert readme.main(["--check"]) == 0, "run: python -m bench.readme"


def test_every_section_stands_somewhere() -> None:
    text = "".join(page.read_text() for page in readme.pages(ROOT))
    assert {name for _, name, _ in readme.MARKED.findall(text)} == {
        *readme.SECTIONS,
        *readme.OPTIONS,
    }


def test_a_typed_figure_is_found_and_rewritten(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- bench:serving -->\n300 tokens/s\n<!-- /bench -->\nbelow\n")
    options = [str(page), "--results", str(results)]
    assert readme.main([*options, "--check"]) == 1
    assert "300 tokens/s" in page.read_text()  # a check changes nothing
    assert readme.main(options) == 0
    assert readme.main([*options, "--check"]) == 0
    assert page.read_text().startswith("above\n<!-- bench:serving -->\n")
    assert page.read_text().endswith("<!-- /bench -->\nbelow\n")


@pytest.mark.parametrize("name", sorted(readme.SECTIONS))
def test_a_section_without_a_csv_says_what_to_run(name: str, tmp_path: Path) -> None:
    text = readme.SECTIONS[name](tmp_path)
    assert re.fullmatch(r"Not (measured|computed) yet: `[^`]+`\.", text)


def test_serving_shows_medians_ratios_and_right_answers(results: Path) -> None:
    section = readme.SECTIONS["serving"](results)
    assert re.search(r"\| 8 at once \| ours \| 300 \| 36 / 40 \|  \|", section)
    assert re.search(r"\| 4 per s \| built-in \| 100 \| 36 / 40 \| - \| 3.00 \|", section)
    assert "commit abc1234, a machine" in section
    assert "**adaptive denoise steps, questions (rounds: 1)**" in section


def test_what_was_not_measured_has_no_line(results: Path) -> None:
    text = readme.comparison(results)
    assert "| DiffusionGemma | vLLM's built-in" in text and "LLM.chat" not in text


# --- README's table: ours divided by the other's, round by round ---------------------------------


def runs(about: dict[str, Any], load: int, contestant: str, *speeds: float) -> list[dict[str, Any]]:
    about = {"commit": "abc1234", "machine": "a machine", "versions": "vllm 0"} | about
    return [
        about | {"contestant": contestant, "concurrency": load, "pair": pair, "tokens_per_s": speed}
        for pair, speed in enumerate(speeds)
    ]


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    about = {"schedule": "adaptive"}
    serving = runs(about, 1, OURS, 300, 200) + runs(about, 1, BUILTIN, 100, 100)
    serving += runs(about, 32, OURS, 100) + runs(about, 32, BUILTIN, 200)
    serving += runs({"schedule": "fixed"}, 1, BUILTIN, 1, 1)  # random tokens: left out
    write_csv(tmp_path / readme.SERVING, serving)
    settings = runs(about, 32, OURS, 110) + runs(about, 32, f"{BUILTIN} --max-num-seqs 64", 100)
    write_csv(tmp_path / readme.SETTINGS, settings)
    write_csv(tmp_path / readme.FAMILIES, runs(about, 1, OURS, 90) + runs(about, 1, PIPELINE, 30))
    write_csv(tmp_path / readme.ENGINE, runs(about, 1, OURS, 240) + runs(about, 1, BUILTIN, 120))
    about = {"target": "smollm2", "family": "mixed"}
    drafting = runs(about, 1, "adaptive, lookup", 90) + runs(about, 1, "n-gram", 100)
    drafting += runs(about | {"target": "another"}, 1, "n-gram", 1)
    write_csv(tmp_path / readme.SMOLLM2, drafting)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "| vLLM's built-in DiffusionGemma | 2.50 [2.00 .. 3.00] | - | 0.50 "
        "| [abc1234](bench/results/serve_compiled.csv) |",
        "(default: 8) | - | - | 1.10 | [abc1234](bench/results/serve_settings.csv)",
        "SDAR, blocks of 32 | diffusers' pipeline, no server | 3.00 | - | - |",
        "`LLM.chat` | vLLM's built-in DiffusionGemma | 2.00 | - | - |",
        "| vLLM without drafts | - | - | - |",
        "| vLLM's n-gram drafts | 0.90 | - | - | [abc1234]",
    ],
)
def test_wins_and_losses_stand_side_by_side(line: str, compared: Path) -> None:
    assert line in readme.comparison(compared)
    assert readme.comparison(compared).endswith("\n\na machine, vllm 0.")


def test_a_table_of_options_says_what_their_model_allows() -> None:
    rows = options_table(RemoteOptions).splitlines()
    assert "| `policy` | `adaptive`, `fixed` | `adaptive` | " in rows[4]
    assert rows[3].startswith("| `deadline_ms` | above 0 to 10,000 | `50.0` | how long")
    assert rows[5].startswith("| `width` | at least 0 | - | ")
