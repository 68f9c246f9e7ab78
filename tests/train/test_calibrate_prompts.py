"""What a calibration asks: the shipped prompts, and the flags that override settings."""

import json
from collections import Counter

import pytest

from dllm import cli
from dllm.drafter.samples import read_shards
from dllm.prompts.files import BUNDLED, BUNDLED_DOMAINS
from dllm.settings.command import CommandError
from dllm.train import commands, drafter
from dllm.train.export import START
from dllm.train.responses import load_prompts
from dllm.train.settings import NEW, DrafterTraining
from tests.support.calibrate_cases import TOML
from tests.support.drafter_pairs import give_byte_tokenizer, write_drafter, write_target


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A target whose tokens are bytes."""
    return give_byte_tokenizer(write_target(tmp_path_factory.mktemp("foreign") / "target"))


def lines() -> list[dict]:
    return [json.loads(line) for line in BUNDLED.read_text().splitlines()]


def test_the_shipped_prompts_cover_every_domain_equally():
    domains = [line["domain"] for line in lines()]
    assert len(domains) >= 40 and len(set(domains)) == BUNDLED_DOMAINS
    (each,) = set(Counter(domains).values())
    # One of each domain first, so that a few prompts are of many domains.
    assert domains == domains[:BUNDLED_DOMAINS] * each
    texts = [json.dumps(line.get("prompt") or line["messages"]) for line in lines()]
    assert len(set(texts)) == len(texts)


def test_they_are_the_default(foreign, tmp_path):
    given = commands.parse_drafter(["--target", str(foreign), "--out", str(tmp_path)])
    assert given.prompts == BUNDLED and drafter.load_settings(given) == NEW
    prompts = load_prompts(foreign, BUNDLED, DrafterTraining(heldout=100))
    assert len(prompts) == len(lines())
    heldout = [prompt.group for prompt in prompts if prompt.is_heldout]
    assert sorted(heldout) == sorted({line["domain"] for line in lines()})
    first = bytes(lines()[0]["prompt"], "utf-8")
    assert len(prompts[0].tokens) == len(first)  # a token a byte


def test_flags_override_the_config(foreign, tmp_path, capsys):
    (tmp_path / "config.toml").write_text(TOML)
    run = tmp_path / "run"
    flags = "--num-prompts 6 --heldout 3 --max-tokens 5 --steps 2 --batch-size 3"
    arguments = ["train", "drafter", "--target", str(foreign), "--out", str(run), "--device", "cpu"]
    arguments += ["--config", str(tmp_path / "config.toml"), *flags.split()]
    assert cli.main([*arguments, "--learning-rate", "0.01"]) == 0
    used = json.loads((run / START).read_text())
    assert (used["steps"], used["batch_size"], used["anchors"]) == (2, 3, 4)
    assert (used["matrix_lr"], used["vector_lr"]) == (0.01, pytest.approx(0.0015))
    train = list(read_shards(run / "responses/train"))
    assert len(train) == 6 and len(read_shards(run / "responses/heldout")) == 3
    assert max(len(one.tokens) - one.response_start for one in train) <= 5
    card = (run / "model/README.md").read_text()
    assert "By group: from " in card and "prompts of general.jsonl" in card

    assert cli.main([*arguments, "--learning-rate", "7", "--out", str(tmp_path / "other")]) == 1
    assert "matrix_lr = 7.0; allowed" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_wrong_line_is_named_by_its_number_in_the_file(foreign, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\n{"prompt": "a"}\n\n{"prompt": 3}\n')
    with pytest.raises(CommandError, match="line 4"):
        load_prompts(foreign, file, DrafterTraining(heldout=1))
    file.write_bytes(b"\xff\n")
    with pytest.raises(CommandError, match="UTF-8"):
        load_prompts(foreign, file, DrafterTraining(heldout=1))


def test_a_drafter_is_checked_on_them(foreign, tmp_path, capsys):
    drafter = write_drafter(tmp_path / "drafter")
    status = cli.main(["check-drafter", str(foreign), str(drafter), "--device", "cpu"])
    said = capsys.readouterr().out
    assert status == 1 and "hardly a draft is kept" in said  # both are random
    assert "give --prompts" in said
