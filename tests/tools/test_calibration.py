"""Scores of decisions, by hand and on probabilities whose truth is known."""

import numpy as np
import pytest
from rich.console import Console

from dllm.settings.command import CommandError
from dllm.tools import calibration
from dllm.tools.calibration import Decided
from dllm.tools.decisions import read_lines


def decided(probs, right, hesitation=0.0, **options):
    return Decided("choice", probs, right, 1.0, hesitation, **options)


def test_scores_by_hand():
    """Three questions: sure and right, half sure and wrong, unsure and right."""
    answers = [
        decided([1.0, 0.0], 0, 0.0),
        decided([0.25, 0.75], 0, 0.8),
        decided([0.4, 0.6], 1, 0.8),
    ]
    found = calibration.report(answers)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["brier"] == pytest.approx((0 + 2 * 0.75**2 + 2 * 0.4**2) / 3)
    assert found["ece"] == pytest.approx((0 + 0.75 + 0.4) / 3)
    assert found["hesitation_auroc"] == 0.75  # above one right answer, level with the other
    (loss,) = calibration.log_losses(answers, [1.0])
    assert loss == pytest.approx(-np.log([1, 0.25, 0.6]).mean())


def test_a_terminal_of_80_columns_shows_all_names():
    shown = Console(width=80, record=True)
    found = calibration.report([decided([1.0, 0.0], 0)])
    shown.print(calibration.table({"predicate": found}, "typed decisions"))
    drawn = shown.export_text()
    assert all(word in drawn for name in ("predicate", *found) for word in name.split("_"))


def test_agreement_and_odds():
    answers = [
        Decided("predicate", [0.3, 0.7], None, 0.5, 0.0, odds=0.2, again=[0.6, 0.4]),
        Decided("predicate", [0.9, 0.1], None, 1.0, 0.0, odds=1.0, again=[0.8, 0.2]),
    ]
    found = calibration.report(answers)
    assert found["agreement"] == 0.5 and found["label_mass"] == 0.75
    assert found["odds"] == pytest.approx(0.1)
    assert found["accuracy"] is found["brier"] is None


@pytest.mark.parametrize("sharpened", [0.5, 3.0])
def test_a_fitted_temperature_undoes_a_known_one(sharpened):
    """Answers are drawn from probabilities, which are then sharpened by a power."""
    rng = np.random.default_rng(0)
    answers = []
    for probs in rng.dirichlet([1, 1, 1], 2000):
        right = int(rng.choice(3, p=probs))
        answers.append(decided(calibration.tempered(probs, 1 / sharpened), right))
    found = calibration.cross_validated(answers)
    # 2,000 draws leave an error of a few percent, and the grid one of 1.2 %.
    assert found["temperature"] == pytest.approx(sharpened, rel=0.12)
    assert found["ece_after"] < 0.06
    if sharpened == 3.0:
        assert found["ece_after"] < found["ece"] / 2
        assert found["log_loss_after"] < found["log_loss"]


def test_few_questions_have_no_temperature():
    assert calibration.cross_validated([decided([0.5, 0.5], 0)] * 4) is None


@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        "[]",
        '{"input": "a"}',
        '{"input": "a", "question": {"type": "predicate"}, "answer": "yes"}',
        '{"input": "a", "question": {"type": "predicate"}, "odds": 2}',
        '{"input": "a", "question": {"type": "predicate"}, "odds": 0.3, "answer": null}',
        '{"input": "a", "question": {"type": "predicate"}, "odds": 0.3, "answer": "yes"}',
        "",
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    file = tmp_path / "asked.jsonl"
    file.write_text(line)
    with pytest.raises(CommandError, match=str(file)):
        read_lines(file)
