"""Pages and CSV files agree; what each section makes of its file."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench import readme, roofline, tables
from bench.context import ROOT, provenance, publish, read_csv, write_csv
from bench.profile_step import ENGINE, FORWARD, step_time
from bench.runs import FIGURES
from bench.serve import BUILTIN, OURS, PIPELINE

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
    assert {name for _, name, _ in readme.MARKED.findall(text)} == set(readme.SECTIONS)


def test_links_lead_from_the_page_to_the_results(results: Path) -> None:
    marks = "<!-- bench:serving -->\n<!-- /bench -->"
    assert "](bench/results/serve_compiled.csv)" in readme.document(marks, results)
    assert "](../bench/results/serve_compiled.csv)" in readme.document(marks, results, "../")


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
    section = tables.serving(results)
    assert re.search(r"\| 8 at once \| ours \| 300 \[300 .. 300\] \| .*\| 36 / 40 \|  \|", section)
    assert re.search(
        r"\| 4 per s \| built-in \| 100 \[100 .. 100\] \| .*\| 3.00 \[3.00 .. 3.00\] \|", section
    )
    assert "commit abc1234, a machine" in section
    assert "**adaptive denoise steps, questions (rounds: 1)**" in section


def test_a_run_without_speed_is_named(results: Path) -> None:
    wrong = THEIRS | {"tokens_per_s": None, "problem": "5 of 40 answers are right"}
    write_csv(results / "serve_compiled.csv", [RUN, wrong])
    section = tables.serving(results)
    assert "* built-in: 5 of 40 answers are right" in section
    assert re.search(r"\| built-in \| - \| .*\| - \|$", section, re.MULTILINE)


def test_an_unknown_mark_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="bench:speed: no such section"):
        readme.document("<!-- bench:speed -->\n<!-- /bench -->", results)


def test_csv_files_say_where_they_come_from(tmp_path: Path) -> None:
    publish(tmp_path / "a" / "x.csv", [{"value": 1 / 3, "nothing": None}])
    (row,) = read_csv(tmp_path / "a" / "x.csv")
    assert (row["value"], row["nothing"]) == ("0.333333", "")
    assert row == {"value": "0.333333", "nothing": ""} | provenance()
    assert read_csv(tmp_path / "none.csv") == []


# --- sections of one step ------------------------------------------------------------------------


def test_step_time_has_the_shares_of_a_step(tmp_path: Path) -> None:
    rows = [
        {"server": server, "concurrency": 2, "step_ms": 10.0, "group": part, "share": share} | ABOUT
        for server in (OURS, BUILTIN)
        for part, share in ((ENGINE, 0.4), (FORWARD, 0.5), (FORWARD, 0.1))
    ]
    write_csv(tmp_path / "profile_cpu.csv", rows)
    text = step_time(tmp_path / "profile_cpu.csv")
    for server in (OURS, BUILTIN):
        assert f"| {server} | 2 | 10.00 | 40% | 60% | 0% | 0% | 0% |" in text


def test_blocks_have_a_line_for_each_size_and_load(tmp_path: Path) -> None:
    speeds = {"ours": (300.0, 600.0), "ours --x": (200.0, 300.0), "diffusers": (100.0, 100.0)}
    rows = [
        {"contestant": name, "canvas_length": 32, "concurrency": 1, "pair": pair}
        | {"tokens_per_s": speed}
        | ABOUT
        for name, both in speeds.items()
        for pair, speed in enumerate(both)
    ]
    rows.append(rows[0] | {"canvas_length": 4, "concurrency": 8, "tokens_per_s": 900.0})
    write_csv(tmp_path / "families.csv", rows)
    text = tables.families(tmp_path)
    assert "| B = 32, 1 at once | 450 [300 .. 600] | 1.75 [1.50 .. 2.00] | 4.50 [3.00 .." in text
    assert "| B = 4, 8 at once | 900 [900 .. 900] | - | - |" in text


def test_floors_are_those_of_the_roofline(tmp_path: Path) -> None:
    roofline.main(["--weights", "fp8", "--batch", "1", "--results", str(tmp_path)])
    *_, whole = read_csv(tmp_path / "roofline.csv")
    assert f"| fp8 | 1 | {float(whole['floor_ms']):.1f} | " in roofline.floors(tmp_path)


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
    about = {"canvas_length": 32}
    write_csv(tmp_path / readme.FAMILIES, runs(about, 1, OURS, 90) + runs(about, 1, PIPELINE, 30))
    about = {"target": "tiny-ar", "family": "mixed"}
    drafting = runs(about, 1, "adaptive", 90) + runs(about, 1, "n-gram", 100)
    drafting += runs(about | {"target": "inflated"}, 1, "n-gram", 1)
    write_csv(tmp_path / readme.DRAFTER, drafting)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "| vLLM's built-in DiffusionGemma | 2.50 [2.00 .. 3.00] | - | 0.50 [0.50 .. 0.50] "
        "| [abc1234](bench/results/serve_compiled.csv) |",
        "(default: 8) | - | - | 1.10 [1.10 .. 1.10] | [abc1234](bench/results/serve_settings.csv)",
        "SDAR, blocks of 32 tokens | diffusers' pipeline | 3.00 [3.00 .. 3.00] | - | - | [abc1234]",
        "SDAR, blocks of 4 tokens | diffusers' pipeline | - | - | - |",
        "| vLLM's n-gram drafts | 0.90 [0.90 .. 0.90] | - | - | [abc1234]",
    ],
)
def test_wins_and_losses_stand_side_by_side(line: str, compared: Path) -> None:
    assert line in readme.comparison(compared)
    assert readme.comparison(compared).endswith("\n\na machine, vllm 0.")
