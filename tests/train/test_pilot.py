"""A pilot learns from trials which width to take; the command, from trials to a folder."""

import csv

import pytest
import torch

from dllm.cli import CommandError
from dllm.drafter.widths.pilot import Pilot, PilotConfig
from dllm.train.command import main
from dllm.train.pilot import command as pilot_command
from dllm.train.pilot.network import Trials, scores, train_pilot

WIDTHS = (0, 3, 7)


def made_up_trials(num_prompts: int = 120, are_alike: bool = False) -> Trials:
    """Prompts of two kinds that the first logit tells apart: drafts are kept, or never are."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_prompts, 40, generator=generator)
    is_easy = torch.arange(num_prompts) % 2 == 0
    logits[:, 0] = torch.where(is_easy, 4.0, -4.0)
    tokens = torch.full((num_prompts, 3), 24)
    steps = torch.where(is_easy[:, None], torch.tensor([24, 6, 3]), torch.tensor([24, 23, 22]))
    steps = torch.full_like(steps, 12) if are_alike else steps
    seconds = torch.tensor([1.0, 1.5, 1.6])
    return Trials(WIDTHS, logits, tokens, steps, seconds, torch.arange(num_prompts) % 3 == 0)


@pytest.mark.parametrize("preprocessing", ["raw", "normalized"])
def test_a_pilot_finds_the_fastest_width_of_each_prompt(preprocessing):
    trials = made_up_trials()
    config = PilotConfig(WIDTHS, 40, preprocessing, hidden_size=32)
    pilot = train_pilot(trials, config, "tokens_per_s")
    found = {one.choice: one for one in scores(trials, pilot)}
    assert list(found) == ["pilot", "fixed 0", "fixed 3", "fixed 7", "best of each prompt"]
    best_fixed = max(found[f"fixed {width}"].tokens_per_s for width in WIDTHS)
    assert found["fixed 0"].tokens_per_s == pytest.approx(1.0)
    # 24 tokens in 3 steps of 1.6 s, and in 24 steps of 1 s.
    assert found["best of each prompt"].tokens_per_s == pytest.approx(48 / (3 * 1.6 + 24))
    assert found["pilot"].tokens_per_s > best_fixed
    assert found["pilot"].tokens_per_s == pytest.approx(48 / (3 * 1.6 + 24), rel=0.02)


@pytest.mark.parametrize(("are_alike", "chosen"), [(False, 7), (True, 0)])
def test_the_papers_label_knows_no_cost(are_alike, chosen):
    """The width that accepts most, for every prompt; of those that accept alike the narrowest."""
    trials = made_up_trials(are_alike=are_alike)
    pilot = train_pilot(trials, PilotConfig(WIDTHS, 40, hidden_size=32), "acceptance")
    assert set(pilot.choose(trials.logits).tolist()) == {chosen}


def test_the_command_trains_from_trials_and_reports(tmp_path, capsys):
    trials, out = tmp_path / "trials.safetensors", tmp_path / "pilot"
    made_up_trials().save(trials)
    again = Trials.load(trials)
    assert again.widths == WIDTHS and (again.steps == made_up_trials().steps).all()
    pair = ["--target", "none", "--drafter", "none"]
    assert main(["pilot", *pair, "--out", str(out), "--trials", str(trials)]) == 0
    assert Pilot.load(out).config == PilotConfig(WIDTHS, 40)
    with (out / pilot_command.REPORT).open() as file:
        report = {row["choice"]: float(row["tokens_per_s"]) for row in csv.DictReader(file)}
    assert report["best of each prompt"] >= report["pilot"] >= report["fixed 0"]
    assert str(out) in capsys.readouterr().out


def test_candidates_are_checked_before_anything_is_run(tmp_path):
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    given = ["--target", "t", "--drafter", str(tmp_path), "--out", str(tmp_path / "out")]

    def widths(*flags: str) -> tuple[int, ...]:
        return pilot_command.trial_settings(pilot_command.parse([*given, *flags])).widths

    assert widths() == (0, 1, 2, 3, 5, 7)
    assert widths("--widths", "4", "2") == (2, 4)
    with pytest.raises(CommandError, match=r"9.*from 0 to the 7"):
        widths("--widths", "3", "9")
    with pytest.raises(SystemExit):
        widths("--heldout", "0")
    with pytest.raises(CommandError, match="no such file"):
        main(["pilot", *given, "--trials", str(tmp_path / "none")])
