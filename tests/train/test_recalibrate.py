"""Recalibration beside a server: what is better on held-out traffic is published, nothing else."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from dllm import cli
from dllm.drafter.samples import Sample, write_shard
from dllm.drafter.weight_reload import checkpoint, open_weights, published, read_weights
from dllm.settings.command import CommandError
from dllm.train import commands, recalibrate
from dllm.train.responses import split_buffer
from dllm.train.run import DraftLearner
from tests.support.calibrate_cases import read_config, target, target_path
from tests.support.drafter_pairs import drafter_config, random_drafter, write_drafter

__all__ = ["target", "target_path"]  # fixtures

pytestmark = pytest.mark.slow

LAYERS = (1, 3)


def record(target, folder: Path, number: int, tokens: list[int], count: int = 60) -> None:
    """A shard of responses that repeat these tokens."""
    rng = random.Random(number)
    samples = []
    for _ in range(count):
        start = rng.randrange(len(tokens))
        text = [*rng.sample(range(20, 400), 3), *(tokens * 9)[start : start + 21]]
        samples.append(Sample(tuple(text), 4, "traffic"))
    hidden = [target.hidden_states(torch.tensor([one.tokens]), LAYERS)[0] for one in samples]
    folder.mkdir(exist_ok=True)
    write_shard(folder / f"0-{number:012}.safetensors", samples, hidden, layers=LAYERS)


@pytest.fixture
def start(target, target_path, tmp_path, monkeypatch):
    """The arguments of the command, with a recording of one shard."""
    # A process cannot take back what it gave away, and this one has other tests to run.
    monkeypatch.setattr(recalibrate.os, "nice", lambda _: 0)
    config = drafter_config(block_size=6)
    config["dflash_config"] = config["dflash_config"] | {"target_layer_ids": list(LAYERS)}
    write_drafter(tmp_path / "drafter", config, random_drafter())
    record(target, tmp_path / "buffer", 0, [5, 6, 7])
    folders = {"target": target_path, "drafter": tmp_path / "drafter"}
    folders |= {"buffer": tmp_path / "buffer", "out": tmp_path / "newer"}
    return ["recalibrate", *(f"--{name}={path}" for name, path in folders.items())]


def test_a_better_drafter_is_published_and_the_next_round_goes_on_from_it(
    start, target, tmp_path, capsys, monkeypatch
):
    newer, waits = tmp_path / "newer", []

    def next_recording(seconds: float) -> None:
        waits.append(seconds)
        record(target, tmp_path / "buffer", len(waits), [9, 8, 7, 6])

    monkeypatch.setattr(recalibrate.time, "sleep", next_recording)
    assert cli.main([*start, "--rounds=2", "--steps=120"]) == 0
    printed = capsys.readouterr().out
    assert len(waits) == 1  # the second round waited for a shard that it had not seen
    assert published(newer) == [1, 2], printed
    first, second = (read_weights(open_weights(checkpoint(newer, number))) for number in (1, 2))
    initial = read_weights(open_weights(tmp_path / "drafter"))
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name.removeprefix("model."): tensor.shape for name, tensor in initial.items()
    }
    assert any((first[name] != second[name]).any() for name in first)
    gains = [line for line in printed.splitlines() if line.startswith("round")]
    assert all("published as" in line for line in gains), gains
    # The second begins with what the first has learned: some of its tokens are the same.
    begins = [float(line.split("a step ")[1].split(" ")[0]) for line in gains]
    assert begins[1] > begins[0], gains
    assert not [path for path in newer.iterdir() if path.name.startswith(("round-", "new-"))]


@pytest.mark.parametrize(
    ("after", "is_published"), [(1.9, False), (2.0, False), (2.01, False), (2.03, True)]
)
def test_only_what_is_better_is_published(
    start, tmp_path, capsys, monkeypatch, after, is_published
):
    """2 held-out tokens a step before a round; then less, as many, hardly more, more."""
    lengths = iter([{"length": 2.0}, {"length": after}])
    monkeypatch.setattr(DraftLearner, "evaluate", lambda *_: next(lengths))
    assert cli.main([*start, "--rounds=1", "--steps=1"]) == 0
    assert ("not published" in capsys.readouterr().out) is not is_published
    assert bool(published(tmp_path / "newer")) is is_published


def test_what_is_held_out_stays_held_out(target, tmp_path):
    """When old samples are deleted and others come in between."""
    for number in range(3):
        record(target, tmp_path / "buffer", number, [5, 6, 7])
    train, heldout = split_buffer(tmp_path / "buffer", read_config(num_hidden_layers=1))
    assert 1 < len(heldout) < 30
    next((tmp_path / "buffer").glob("0-*1.safetensors")).unlink()
    later_train, later_heldout = split_buffer(tmp_path / "buffer", read_config(num_hidden_layers=1))
    sides = [{sample.tokens for sample in side} for side in (train, later_heldout)]
    others = [{sample.tokens for sample in side} for side in (heldout, later_train)]
    assert later_heldout and not sides[0] & sides[1] and not others[0] & others[1]


def test_a_text_that_comes_again_is_on_one_side(target, tmp_path):
    """Its digest says nothing about its place: all of them are held out, or none."""
    record(target, tmp_path / "one", 0, [5, 6, 7], count=1)
    (path,) = (tmp_path / "one").iterdir()
    for number in range(22):
        shutil.copy(path, tmp_path / f"one/1-{number:012}.safetensors")
    with pytest.raises(CommandError, match="too few different texts"):
        split_buffer(tmp_path / "one", read_config(num_hidden_layers=1))
    record(target, tmp_path / "one", 3, [5, 6, 7], count=1)
    train, heldout = split_buffer(tmp_path / "one", read_config(num_hidden_layers=1))
    assert not {one.tokens for one in train} & {one.tokens for one in heldout}


def test_a_killed_command_leaves_no_recording(start, tmp_path, monkeypatch):
    (tmp_path / "buffer/round-old").mkdir()
    (tmp_path / "buffer/round-old/0-0.safetensors").write_bytes(b"private")
    monkeypatch.setattr(
        recalibrate, "one_round", lambda *_: signal.raise_signal(signal.SIGTERM) or ""
    )
    with pytest.raises(SystemExit):
        cli.main([*start, "--rounds=1"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert [path.suffix for path in (tmp_path / "buffer").iterdir()] == [".safetensors"]


def test_a_command_leaves_the_recording_that_another_one_reads(start, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(recalibrate, "one_round", lambda given, ends, path: seen.append(path) or "")
    with recalibrate.snapshots(tmp_path / "buffer"):
        (tmp_path / "buffer/round-other").mkdir()
        assert cli.main([*start, "--rounds=1"]) == 0
    assert (tmp_path / "buffer/round-other").is_dir() and not seen[0].exists()


def test_a_recording_that_does_not_exist_is_not_waited_for(start, tmp_path, capsys):
    shutil.rmtree(tmp_path / "buffer")
    assert cli.main(start) == 1
    assert "no such folder" in capsys.readouterr().err


def test_a_short_recording_is_waited_for(start, target, tmp_path, capsys):
    shutil.rmtree(tmp_path / "buffer")
    record(target, tmp_path / "buffer", 0, [5, 6, 7], count=3)
    assert cli.main([*start, "--rounds=1", "--steps=1"]) == 0
    assert "3 samples" in capsys.readouterr().out


def test_a_recording_of_other_layers_is_refused(start, tmp_path):
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 3]
    (tmp_path / "drafter/config.json").write_text(json.dumps(config))
    arguments = commands.parse_recalibrate(start[1:])
    ends = recalibrate.TargetEmbeddingsAndHead.read(arguments.target, "cpu")
    with pytest.raises(CommandError, match=r"layers \[1, 3\]"):
        recalibrate.one_round(arguments, ends, arguments.buffer)


def test_old_drafters_are_deleted(tmp_path):
    config, weights = drafter_config(), random_drafter()
    for _ in range(6):
        recalibrate.publish(tmp_path, config, weights)
    assert published(tmp_path) == [4, 5, 6]
