"""Figures in one command: files are kept whole or not at all, and every one has its command."""

from pathlib import Path

import pytest

from bench import figures, readme
from bench.context import RESULTS, read_csv
from bench.figures import Figures

FLOORS = "bench.roofline --weights fp8 --batch"


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Calls of the command that writes the pages, which is not run."""
    calls: list[list[str]] = []
    monkeypatch.setattr(readme, "main", calls.append)
    monkeypatch.setattr(figures, "commit", lambda: "abc1234")
    return calls


def test_files_of_one_name_are_joined_in_order(tmp_path: Path, monkeypatch, pages) -> None:
    small, large = (
        Figures(f"{FLOORS} {batch}", (("roofline.csv", "floors.csv"),)) for batch in (1, 8)
    )
    monkeypatch.setattr(figures, "ALL", {"small": small, "large": large})
    assert figures.main(["--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "floors.csv")
    assert [row["batch"] for row in rows] == sorted(row["batch"] for row in rows)
    assert {row["batch"] for row in rows} == {"1", "8"}
    assert rows[0]["command"].endswith("--batch 1 --results DIR")
    assert pages == [[]]
    (tmp_path / "floors.csv").write_text("as it was")
    assert figures.main(["small", "--results", str(tmp_path)]) == 0  # a part is missing
    assert (tmp_path / "floors.csv").read_text() == "as it was"


def test_figures_that_fail_leave_their_file(tmp_path: Path, monkeypatch, capsys) -> None:
    kept = (("roofline.csv", "roofline.csv"),)
    wrong = Figures(f"{FLOORS} many", kept)
    unprepared = Figures(f"{FLOORS} 1", kept, before=f"{FLOORS} many")
    good = Figures(f"{FLOORS} 1", (("roofline.csv", "good.csv"),))
    monkeypatch.setattr(figures, "ALL", {"wrong": wrong, "unprepared": unprepared, "good": good})
    assert figures.main(["--results", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good.csv"]
    said = capsys.readouterr().err
    assert "wrong failed" in said and "unprepared failed" in said and "good failed" not in said


def test_a_changed_tree_and_unknown_names_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        figures.main(["speed"])
    assert "speed: no such figures; allowed: serve" in capsys.readouterr().err
    monkeypatch.setattr(figures, "commit", lambda: "abc1234-dirty")
    assert figures.main(["--results", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_every_file_of_the_results_is_made_by_one_command() -> None:
    kept = {kept for one in figures.ALL.values() for _, kept in one.files}
    assert kept == {path.name for path in RESULTS.glob("*.csv")}
