"""dllm check-drafter: a good pair passes, others do not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.toys import prompts
from dllm import cli

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


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> str:
    """A file of held-out questions, one of each family."""
    file = tmp_path_factory.mktemp("asked") / "toys.jsonl"
    assert prompts.main([str(file), "--heldout", "1"]) == 0
    return str(file)


def check(capsys: pytest.CaptureFixture[str], drafter: Path, asked: str) -> dict:
    """The JSON of a check; its ``ok`` agrees with the exit status."""
    flags = ["--prompts", asked, "--json", "-"]
    status = cli.main(["check-drafter", str(TARGET), str(drafter), *flags])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return found


def layers() -> list[int]:
    """Those that tiny-drafter reads."""
    config = json.loads((DRAFTER / "config.json").read_text())
    return config["dflash_config"]["target_layer_ids"]


def test_a_pair_that_fits_passes_and_a_wrong_convention_costs_tokens(broken, capsys, asked):
    found = check(capsys, DRAFTER, asked)
    assert found["ok"] and 3 < found["tokens_a_step"] < found["tokens_a_step_possible"]
    path = broken(dflash={"target_layer_ids": [i - 1 for i in layers()]})
    wrong = check(capsys, path, asked)
    assert wrong["tokens_a_step"] < found["tokens_a_step"] - 0.1


def test_a_drafter_of_another_target_does_not_fit(broken, capsys, asked):
    path = broken()
    weights = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = (torch.randn(tensor.shape, generator=draw) * 0.02).to(tensor.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = check(capsys, path, asked)
    assert not found["ok"] and found["kept_by_position"][0] < 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 99}, "vocabulary of 99"),
        ({"dflash": {"target_layer_ids": layers()[::-1]}}, "Sort the list"),
    ],
)
def test_pairs_that_a_server_refuses_are_refused(broken, capsys, changes, said):
    assert cli.main(["check-drafter", str(TARGET), str(broken(**changes))]) == 1
    assert said in capsys.readouterr().err


def test_command_lines_that_cannot_work_are_refused(capsys, tmp_path):
    assert cli.main(["check-drafter", str(TARGET), str(tmp_path)]) == 1
    assert "no drafter with config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["check-drafter", str(TARGET), str(tmp_path), "--num-prompts", "0"])
    assert "--num-prompts is at least 1" in capsys.readouterr().err
