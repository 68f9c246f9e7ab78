"""A pilot learns from trials which width pays; the command, from a pair to a file."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from dllm import cli
from dllm.drafter.widths.pilot import FILE, Pilot, PilotConfig
from dllm.settings.command import CommandError
from dllm.settings.drafting import DrafterOptions, always_verifies_all
from dllm.train import pilot
from dllm.train.export import START
from dllm.train.pilot import loss_of, right_widths, scores, step_ms, train
from dllm.train.pilot_trials import Trials, candidates, recorded
from dllm.train.settings import PilotTraining
from tests.support.calibrate_cases import PROMPTS
from tests.support.drafter_pairs import drafter_config, write_drafter, write_target

WIDTHS, TRAINED, VOCAB, TOKENS = (3, 4, 5), 4, 40, 24


def made_up(num_prompts: int = 120, tells: bool = True) -> Trials:
    """Prompts of two kinds: a block of 5 is kept whole, or hurts.

    tells: the first logit says which kind it is; otherwise the kinds are alike in their drafts.
    """
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(num_prompts, VOCAB, generator=draw)
    is_easy = torch.arange(num_prompts) % 2 == 0
    logits[:, 0] = torch.where(is_easy, 4.0, -4.0)
    easy, hard = torch.tensor([3, 4, 5]), torch.tensor([3, 2, 1])
    kept = torch.where((is_easy if tells else ~is_easy & False)[:, None], easy, hard)
    return Trials(
        WIDTHS,
        logits.bfloat16(),
        TOKENS * torch.arange(num_prompts + 1),
        kept.repeat_interleave(TOKENS, 0).to(torch.int16),
        torch.arange(num_prompts) % 3 == 0,
    )


def small(**more: object) -> PilotTraining:
    return PilotTraining.from_mapping({"hidden_size": 32, "radius": 1} | more)


def test_steps_are_replayed_token_by_token():
    trials = made_up(2)
    # 24 tokens, of which each step emits its kept drafts and one more.
    assert trials.steps.tolist() == [[6, 5, 4], [6, 8, 12]]
    assert trials.of(torch.tensor([False, True])).steps.tolist() == [[6, 8, 12]]


def test_trials_are_read_again_and_joined(tmp_path):
    trials = made_up(4)
    trials.save(tmp_path / "some.safetensors")
    again = Trials.load(tmp_path / "some.safetensors")
    twice = Trials.joined([again, trials])
    assert again.widths == WIDTHS
    assert torch.equal(again.logits, trials.logits)
    assert twice.steps.tolist() == 2 * trials.steps.tolist()


def test_ties_share_the_label():
    steps = torch.tensor([[5, 5, 7], [3, 2, 1], [4, 4, 4]])
    expected = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1 / 3] * 3]
    torch.testing.assert_close(right_widths(steps), torch.tensor(expected))
    scores_, ms = torch.randn(3, 3), torch.ones(3)
    crossed = torch.nn.functional.cross_entropy(scores_, torch.tensor(expected))
    torch.testing.assert_close(loss_of(scores_, steps, ms, "acceptance"), crossed)


def test_the_other_label_is_the_expected_time():
    steps, ms = torch.tensor([[6, 5, 4]]), step_ms(WIDTHS, (1.0, 0.25, 0.25))
    assert ms.tolist() == [2.0, 2.25, 2.5]
    even = loss_of(torch.zeros(1, 3), steps, ms, "tokens_per_s")
    assert float(even) == pytest.approx((12 + 11.25 + 10) / 3 / 10)


@pytest.mark.parametrize("label", ["acceptance", "tokens_per_s"])
@pytest.mark.parametrize("reads", ["raw", "softmax"])
def test_a_pilot_tells_prompts_apart(label, reads):
    trials, ms = made_up(), step_ms(WIDTHS, (1.0, 0.25, 0.25))
    settings = small(label=label, reads=reads)
    pilot = train(trials.of(~trials.is_heldout), settings, ms, "cpu")
    assert pilot.hidden.weight.dtype == torch.bfloat16
    found = scores(trials.of(trials.is_heldout), ms, pilot)
    assert found["best fixed"].choice == "fixed 3"  # (4 + 4) / 2 tokens a step
    assert found["fixed 3"].tokens_a_step == pytest.approx(4)
    # 24 tokens in 4 steps of 2.5 ms, and in 6 of 2.
    assert found["oracle"].value == pytest.approx(48 / (10 + 12))
    assert found["pilot"].value == pytest.approx(found["oracle"].value, rel=0.01)


def test_where_nothing_tells_them_apart_it_is_the_best_fixed_width():
    trials = made_up(tells=False)
    pilot = train(trials.of(~trials.is_heldout), small(), torch.ones(3), "cpu")
    assert set(pilot.choose(trials.logits).tolist()) == {0}


def test_a_file_is_read_again(tmp_path):
    torch.manual_seed(0)
    pilot, logits = Pilot(PilotConfig(WIDTHS, VOCAB, 8, "softmax")), torch.randn(50, VOCAB)
    pilot.save(tmp_path / FILE)
    again = Pilot.load(tmp_path / FILE, "cpu")
    assert again.config == pilot.config
    assert torch.equal(again.choose(logits), pilot.bfloat16().choose(logits))
    options = DrafterOptions(policy="pilot", pilot=str(tmp_path / FILE))
    assert not always_verifies_all(options, 5)


def test_what_is_no_pilot_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no pilot"):
        PilotConfig.read(tmp_path / FILE)
    for wrong in ({"widths": (3, 1)}, {"widths": ()}, {"reads": "top_k"}, {"hidden_size": 0}):
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            PilotConfig(**{"widths": (1,), "vocab_size": 4} | wrong)
    with pytest.raises(ValueError, match='needs "pilot"'):
        DrafterOptions(policy="pilot")


@pytest.mark.parametrize(("tells", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_says_whether_the_best_fixed_width_is_beaten(
    tells, status, tmp_path, capsys
):
    assert pilot.finish(tmp_path, made_up(tells=tells), small(), "cpu") == status
    said = capsys.readouterr().out
    assert ("does not beat" in said) is bool(status) and said.count("\n") == 1
    assert Pilot.load(tmp_path / FILE, "cpu").config.widths == WIDTHS
    with (tmp_path / pilot.REPORT).open() as file:
        report = {row["name"]: float(row["tokens_a_step"]) for row in csv.DictReader(file)}
    assert report["oracle"] >= report["pilot"] >= report["best fixed"] == report["fixed 3"]


def test_candidates_lie_around_the_trained_width():
    assert candidates(15, 2) == (13, 14, 15, 16, 17)
    assert candidates(2, 3) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("is_heldout", [[True, False, False, False, False], [False] * 6])
def test_too_few_prompts_with_anything_to_draft_are_refused(is_heldout, tmp_path):
    """One more on each side has an answer of a single token."""
    some = made_up(len(is_heldout))
    trials = replace(
        some,
        logits=torch.cat([some.logits, some.logits[-2:]]),
        starts=torch.cat([some.starts, some.starts[-1:], some.starts[-1:]]),
        is_heldout=torch.tensor([*is_heldout, False, True]),
    )
    trials.save(tmp_path / "some.safetensors")
    with pytest.raises(CommandError, match=str(tmp_path)):
        recorded(tmp_path)


def test_the_command_goes_from_a_pair_to_a_report(tmp_path, capsys, monkeypatch):
    """And on from what was recorded; another run in the same place is refused."""
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", drafter_config(block_size=4))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "pilot.toml").write_text("steps = 2\nhidden_size = 8\ntemperatures = [0.0, 1.0]\n")
    out = tmp_path / "out"
    flags = ["--target", target, "--drafter", drafter, "--prompts", tmp_path / "prompts.txt"]
    flags += ["--config", tmp_path / "pilot.toml", "--heldout", 4, "--max-tokens", 6, "--out", out]
    command = ["train", "pilot", *map(str, flags)]
    first = cli.main(command)
    assert len(list((out / pilot.TRIALS).iterdir())) == 2
    assert Pilot.load(out / FILE, "cpu").config == PilotConfig((1, 2, 3, 4, 5), 512, 8)
    (out / FILE).unlink()
    assert cli.main([*command, "--resume"]) == first
    assert (out / FILE).exists()
    assert cli.main(command) == 1
    assert "holds a run" in capsys.readouterr().err
    files = {file: file.stat().st_mtime_ns for file in (out / pilot.TRIALS).iterdir()}
    measured = [(1.0, 0.25, 0.25)]
    monkeypatch.setattr(pilot, "measured_costs", lambda *_: measured.pop())
    for _ in range(2):  # costs are measured once
        cli.main([*command, "--resume", "--label", "tokens_per_s", "--hidden-size", "4"])
    assert Pilot.load(out / FILE, "cpu").config.hidden_size == 4
    assert json.loads((out / START).read_text())["label"] == "tokens_per_s"
    assert {file: file.stat().st_mtime_ns for file in files} == files
    capsys.readouterr()
    assert cli.main([*command, "--resume", "--radius", "1"]) == 1
    assert "radius" in capsys.readouterr().err
