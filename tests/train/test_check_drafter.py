"""dllm check-drafter: a good pair passes, and every breakage of its checkpoint is named."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm import cli
from dllm.drafter.samples import Sample
from dllm.train.drafter.check import Checker, Reading
from dllm.train.drafter.network import DraftNetwork, draft_inputs
from dllm.train.drafter.target import Target
from tests.support.calibrate_cases import read_config
from tests.support.drafter_pairs import random_drafter, write_target

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TARGET, DRAFTER = CHECKPOINTS / "tiny-ar", CHECKPOINTS / "tiny-drafter"


@pytest.fixture
def broken(tmp_path):
    """Copies of tiny-drafter with other values in config.json: ``broken(rope_theta=...)``."""

    def write(**changes: object) -> Path:
        path = tmp_path / "drafter"
        shutil.copytree(DRAFTER, path)
        config = json.loads((path / "config.json").read_text())
        dflash = changes.pop("dflash", {})
        config |= changes | {"dflash_config": config["dflash_config"] | dflash}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return write


def check(capsys: pytest.CaptureFixture[str], drafter: Path) -> dict:
    """The JSON of a check; its ``ok`` agrees with the exit status."""
    status = cli.main(["check-drafter", str(TARGET), str(drafter), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return found


@pytest.fixture(scope="module")
def whole() -> dict:
    """The check of the pair as it is shipped."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["check-drafter", str(TARGET), str(DRAFTER), "--json", "-"]) == 0
    return json.loads(printed.getvalue())


def test_a_pair_that_fits_passes(whole, tmp_path, capsys):
    found = whole
    assert found["ok"] and found["mismatches"] == [] and found["refused"] is None
    assert found["tokens_a_step"] > 3
    assert len(found["tried"]) > 10
    assert max(found["tried"].values()) < found["tokens_a_step"] + 0.1


def layers() -> list[int]:
    """Those that tiny-drafter reads."""
    config = json.loads((DRAFTER / "config.json").read_text())
    return config["dflash_config"]["target_layer_ids"]


BREAKAGES = {
    "one too low": ("layer index", dict(dflash={"target_layer_ids": [i - 1 for i in layers()]})),
    "one too high": ("layer index", dict(dflash={"target_layer_ids": [i + 1 for i in layers()]})),
    "theta": ("RoPE theta", dict(rope_theta=1e6)),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_every_breakage_is_named(whole, broken, capsys, name):
    what, changes = BREAKAGES[name]
    found = check(capsys, broken(**changes))
    named = [mismatch["what"] for mismatch in found["mismatches"]]
    # Ids that a server refuses anyhow are refused here, too, with what they would mean.
    assert what in named or (name == "one too high" and found["refused"])
    assert set(named) <= {what}
    if named:
        last = found["mismatches"][-1]
        assert last["after"] == pytest.approx(whole["tokens_a_step"], abs=0.1)
        assert last["after"] > last["before"] + 0.1


def test_causality_that_the_drafter_does_not_use_makes_no_difference(whole, broken, capsys):
    """Positions of tiny-drafter hardly look ahead: read as causal it drafts the same."""
    found = check(capsys, broken(is_causal=True))
    assert found["ok"] and found["tokens_a_step"] == pytest.approx(whole["tokens_a_step"], abs=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_causality_that_matters_is_named(tmp_path, is_causal):
    """Random weights, and responses that are what they draft with one causality."""
    block, width = 5, 4
    target = Target(write_target(tmp_path / "target"), "cpu")
    reading = Reading(read_config(), (1, 3))
    layers = tuple(replace(one, is_causal=is_causal) for one in reading.config.layers)
    trained = replace(reading, config=replace(reading.config, layers=layers))
    network = DraftNetwork(trained.config)
    network.load_state_dict(random_drafter())
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(20, 450, (40, 9), generator=draw)
    with torch.no_grad():
        anchors = torch.full((40, 1), 8)
        ids = draft_inputs(tokens, anchors, block, trained.config.mask_token_id)
        features = target.hidden_states(tokens, trained.layer_ids)
        hidden = network(features, target.embedding[ids], anchors)[:, 0, 1:]
        drafts = (hidden @ target.head.T).argmax(-1)
    samples = [
        Sample((*prompt, *said), 8, "all")
        for prompt, said in zip(tokens.tolist(), drafts.tolist(), strict=True)
    ]
    rope = {"rope_type": "default", "rope_theta": 1e6}
    checker = Checker(network, target, samples, block, {}, rope)
    assert checker.run(trained).is_ok
    other = tuple(replace(one, is_causal=not is_causal) for one in layers)
    wrong = replace(trained, config=replace(trained.config, layers=other))
    (found,) = checker.run(wrong).mismatches
    assert found.what == "causality"
    assert found.after == pytest.approx(width) and found.before < width - 0.5


def test_two_breakages_are_both_named(broken, capsys):
    found = check(capsys, broken(is_neox_style=False, dflash={"mask_token_id": 6}))
    assert {one["what"] for one in found["mismatches"]} == {"RoPE style", "mask token"}


def test_columns_in_another_order_are_named(broken, capsys):
    """An unsorted list: a server refuses it, and the check says what would fit."""
    found = check(capsys, broken(dflash={"target_layer_ids": layers()[::-1]}))
    assert "Sort the list" in found["refused"]
    assert [one["what"] for one in found["mismatches"]] == ["layer index"]
    assert "(ascending)" in found["mismatches"][0]["better"]


def test_a_drafter_of_another_target_fits_no_reading(broken, capsys):
    path = broken()
    weights = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = (torch.randn(tensor.shape, generator=draw) * 0.02).to(tensor.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = check(capsys, path)
    assert found["fits_no_reading"] and not found["mismatches"]


def test_pairs_that_cannot_be_measured_are_refused(broken, capsys, tmp_path):
    assert cli.main(["check-drafter", str(TARGET), str(broken(vocab_size=99))]) == 1
    assert "vocabulary of 99" in capsys.readouterr().err
    assert cli.main(["check-drafter", str(TARGET), str(tmp_path)]) == 1
    assert "no drafter with config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["check-drafter", str(TARGET), str(tmp_path), "--num-prompts", "1"])
    assert "at least 2" in capsys.readouterr().err
