"""bench/engine_start.py: what counts as a working engine, and what is written of one that fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import engine_start
from bench.context import read_csv
from bench.engine_start import EXPECTED, MODEL, STAGES, compared, run_stage

WANTED = json.loads(EXPECTED.read_text())


def test_the_expected_answers_are_those_of_the_checkpoint() -> None:
    """After another training: `python -m bench.engine_start --write`."""
    assert WANTED["model_sha256"] == engine_start.weights_sha256(MODEL)
    asked = WANTED["questions"]
    assert len({one["family"] for one in asked[: len(asked) // 2]}) == len(asked) // 2
    for server in ("ours", "built-in"):
        assert sum(one[server].strip() in one["accepted"] for one in asked) >= 0.9 * len(asked)


def test_agreement_is_counted_and_too_many_wrong_answers_fail() -> None:
    texts = [one["ours"] for one in WANTED["questions"]]
    said = compared("ours-compiled", WANTED, texts, MODEL, 2)
    assert said.startswith(f"{len(texts)} of {len(texts)} answers as on a CPU")
    said = compared("ours", WANTED, ["?", *texts[1:4]], MODEL, 2)
    assert said.startswith("3 of 4 answers as on a CPU, 3 right")
    with pytest.raises(ArithmeticError, match="1 of 4 answers"):
        compared("ours", WANTED, ["?", "?", "?", texts[3]], MODEL, 2)
    other = WANTED | {"model_sha256": "0"}
    assert "other weights" in compared("ours", other, texts, MODEL, 2)


def test_what_an_engine_raises_is_written(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    absent = str(tmp_path / "absent")
    run_stage({"stage": "ours", "model": absent, "expected": absent, "path": str(path)})
    found = json.loads(path.read_text())
    assert found["status"] == "failed" and found["detail"].startswith("FileNotFoundError")


def test_a_stage_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    def run(stage: str, *_: Any) -> dict[str, Any]:
        is_ours = stage == "ours"
        status, detail = ("failed", "no memory") if is_ours else ("ok", "fine")
        return {"status": status, "detail": detail, "seconds": 1.0, "ready_s": None}

    assert engine_start.main(["--results", str(tmp_path)], run) == 1
    rows = read_csv(tmp_path / "start.csv")
    assert [(row["stage"], row["status"]) for row in rows] == [
        (stage, "failed" if stage == "ours" else "ok") for stage in STAGES[:3]
    ]
