"""dllm check-drafter: a good pair passes, others do not."""

import json
from pathlib import Path

import pytest
import torch

from bench.toys import prompts
from dllm import cli
from tests.support.edited import edited, with_fields

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TARGET, DRAFTER = CHECKPOINTS / "tiny-ar", CHECKPOINTS / "tiny-drafter"
DFLASH = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]
LAYERS = DFLASH["target_layer_ids"]  # that it reads


@pytest.fixture
def broken(tmp_path):
    """Copies of tiny-drafter with other values in config.json: ``broken(rope_theta=...)``."""

    def write(**changes: object) -> Path:
        dflash = DFLASH | changes.pop("dflash", {})
        return with_fields(DRAFTER, tmp_path / "drafter", dflash_config=dflash, **changes)

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


def test_a_pair_that_fits_passes_and_a_wrong_convention_costs_tokens(broken, capsys, asked):
    found = check(capsys, DRAFTER, asked)
    assert found["ok"] and 3 < found["tokens_a_step"] < found["tokens_a_step_possible"]
    path = broken(dflash={"target_layer_ids": [i - 1 for i in LAYERS]})
    wrong = check(capsys, path, asked)
    assert wrong["tokens_a_step"] < found["tokens_a_step"] - 0.1


def test_a_drafter_of_another_target_does_not_fit(tmp_path, capsys, asked):
    draw = torch.Generator().manual_seed(0)

    def redraw(weights: dict[str, torch.Tensor]) -> None:
        for tensor in weights.values():
            if tensor.ndim == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.02)

    found = check(capsys, edited(DRAFTER, tmp_path / "other", redraw), asked)
    assert not found["ok"] and found["kept_by_position"][0] < 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 99}, "vocabulary of 99"),
        ({"dflash": {"target_layer_ids": LAYERS[::-1]}}, "Sort the list"),
    ],
)
def test_pairs_that_a_server_refuses_are_refused(broken, capsys, changes, said):
    assert cli.main(["check-drafter", str(TARGET), str(broken(**changes))]) == 1
    assert said in capsys.readouterr().err
