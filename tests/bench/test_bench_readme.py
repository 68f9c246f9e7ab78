"""Sections of our pages come from CSV files, and the pages in the repository agree."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import readme, roofline, tables
from bench.context import ROOT, provenance, read_csv, write_csv
from bench.measure import Measurement, csv_rows
from bench.profile_step import ENGINE, FORWARD, step_time
from bench.serve import BUILTIN, OURS
from bench.workloads import ADAPTIVE, Shape, Workload

ABOUT = {
    "commit": "abc1234",
    "machine": "a machine",
    "versions": "vllm 0",
    "command": "python -m bench.serve",
}
WORKLOAD = Workload(ADAPTIVE, 40, Shape(32, 32, 32), concurrency=8)
RUN = Measurement(
    contestant=OURS,
    pair=0,
    num_requests=40,
    tokens_per_s=300.0,
    ttft_ms=50.0,
    latency_ms=60.0,
    latency_p99_ms=90.0,
    ms_per_denoise_step=6.0,
    steps_per_block=3.0,
    passes_per_block=3.0,
    tokens_per_pass=5.0,
    num_correct=36,
)
THEIRS = replace(RUN, contestant=BUILTIN, tokens_per_s=100.0)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One CSV of every kind."""
    runs = [(WORKLOAD, RUN), (WORKLOAD, THEIRS)]
    runs += [(replace(WORKLOAD, concurrency=None, rate=4.0), one) for one in (RUN, THEIRS)]
    write_csv(tmp_path / "serve_compiled.csv", csv_rows(runs, ABOUT))
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


@pytest.mark.parametrize("name", sorted(set(readme.SECTIONS) - {"models"}))  # of model cards
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
    wrong = replace(THEIRS, tokens_per_s=None, problem="5 of 40 answers are right")
    runs = [(WORKLOAD, RUN), (WORKLOAD, wrong)]
    write_csv(results / "serve_compiled.csv", csv_rows(runs, ABOUT))
    section = tables.serving(results)
    assert "* built-in: 5 of 40 answers are right" in section
    assert re.search(r"\| built-in \| - \| .*\| - \|$", section, re.MULTILINE)


def test_an_unknown_mark_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="bench:speed: no such section; allowed: models, "):
        readme.document("<!-- bench:speed -->\n<!-- /bench -->", results)


def test_csv_files_say_where_they_come_from(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "x.csv", [{"value": 1 / 3, "nothing": None} | provenance("bench.x")])
    (row,) = read_csv(tmp_path / "a" / "x.csv")
    assert (row["value"], row["nothing"]) == ("0.333333", "")
    assert all(row[name] for name in ("commit", "machine", "versions", "command"))
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
