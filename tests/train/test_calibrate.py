"""dllm train drafter: the loop, files, responses and refusals, without an engine."""

import csv
import json
import re
import shutil
import stat
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import openai
import pytest
import torch
from transformers import AutoTokenizer

from dllm import cli
from dllm.cli import CommandError
from dllm.drafter.samples import Sample, read_shard, read_shards, write_shard
from dllm.tools.client import Connection
from dllm.train import commands, drafter
from dllm.train import run as run_module
from dllm.train.export import LOG, Drafter, block_of, read_checkpoint
from dllm.train.network import NEVER, count_params
from dllm.train.responses import check_disk, refuse_other_model
from dllm.train.settings import DrafterTraining, bundled_configs
from dllm.train.target import read_config as read_target_config
from dllm.train.target import target_facts
from tests.support.calibrate_cases import (
    PROMPTS,
    TOML,
    calibration,
    new_drafter,
    random_samples,
    small_settings,
    target,
    target_path,
    weights_of,
)
from tests.support.chat_stub import Stub, serve
from tests.support.drafter_pairs import (
    MASK,
    give_byte_tokenizer,
    random_drafter,
    write_drafter,
    write_target,
)
from tests.support.edited import with_fields

__all__ = ["target", "target_path"]  # fixtures

# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_vocab_size", "revealed_share"), [(None, 0.0), (256, 0.5)])
def test_it_learns_ten_responses_by_heart(target, tmp_path, draft_vocab_size, revealed_share):
    samples = random_samples(target, 10)
    settings = small_settings(
        steps=150,
        batch_size=10,
        anchors=8,
        evaluate_every=75,
        checkpoint_every=150,
        revealed_share=revealed_share,
    )
    chosen = {"draft_vocab_size": draft_vocab_size}
    run = calibration(target, samples, tmp_path / "run", settings, **chosen)
    losses = [run.loss for _ in run.run()]
    assert losses[-1] < losses[0] / 4
    untrained = calibration(target, samples, tmp_path / "other", settings, **chosen)
    assert untrained.learner.evaluate(untrained.average)["length"] < 1.2
    assert run.rows[-1]["length"] > 2.5  # of 4 possible


def test_positions_that_are_shown_are_not_learned(target, tmp_path, monkeypatch):
    run = calibration(
        target, random_samples(target, 5), tmp_path, small_settings(revealed_share=1.0)
    )
    learner = run.learner
    forward, losses = Mock(wraps=learner.model.forward), Mock(wraps=run_module.losses)
    monkeypatch.setattr(learner.model, "forward", forward)
    monkeypatch.setattr(run_module, "losses", losses)
    learner.loss(0)
    (passed,), (scored,) = forward.call_args_list, losses.call_args_list
    embeds, labels = passed.args[1], scored.args[2]
    mask = learner.embedding[learner.drafter.read.mask_token_id]
    is_mask = (embeds[:, :, 1:] == mask).all(-1)
    assert is_mask.any(-1).all() and not is_mask.all()
    # Masks beyond the end of a response are not learned, either.
    assert 0 < len(labels) <= is_mask.sum()
    assert (~is_mask).sum() + len(labels) <= is_mask.numel()


def test_what_is_shown_is_anything_from_nothing_to_all_but_one():
    exists = torch.arange(4) < torch.tensor([4, 3, 1])[:, None, None].expand(3, 4000, 1)
    shown = run_module.draw_revealed(exists, 0.5, torch.Generator().manual_seed(0))
    assert not (shown & ~exists).any()
    for row, length in zip(shown.sum(-1), (4, 3, 1), strict=True):
        shares = row.bincount(minlength=length) / len(row)
        # Half of the blocks show nothing, and of the others each number is as frequent.
        expected = torch.full((length,), 0.5 / length)
        expected[0] += 0.5
        torch.testing.assert_close(shares, expected, rtol=0, atol=0.04)  # 5 standard deviations


def test_a_reduced_vocabulary_has_the_most_frequent_tokens_and_is_read_again(target, tmp_path):
    samples = random_samples(target, 5)
    said = Counter(token for one in samples for token in one.tokens[one.response_start :])
    fewest = len(said) // 2
    run = calibration(target, samples, tmp_path, small_settings(), draft_vocab_size=fewest)
    list(run.run())
    _, weights = read_checkpoint(tmp_path / "model")
    tokens = weights["d2t"].long() + torch.arange(fewest)
    assert min(said[int(token)] for token in tokens) >= sorted(said.values())[-fewest]
    assert torch.equal(weights["lm_head.weight"], target.head[tokens].bfloat16().float())
    facts = target_facts(read_target_config(Path(target.model.name_or_path)))
    again = Drafter.load(tmp_path / "model", facts).network()
    labels = torch.tensor(list(said))
    drafted = again.as_drafted(labels)
    assert set(labels[drafted != NEVER].tolist()) == set(tokens.tolist())
    assert torch.equal(tokens[drafted[drafted != NEVER]], labels[drafted != NEVER])


def test_a_resumed_run_is_an_uninterrupted_one(target, tmp_path):
    samples = random_samples(target, 5)
    whole = calibration(target, samples, tmp_path / "whole", small_settings())
    list(whole.run())
    first = calibration(target, samples, tmp_path / "parts", small_settings())
    list(first.run(stop_at=3))
    # What can be served is there at every checkpoint.
    written = read_checkpoint(tmp_path / "parts/model")[1]
    for name, tensor in first.average.state_dict().items():
        assert torch.equal(written[name], tensor.bfloat16().float())
    second = calibration(target, samples, tmp_path / "parts", small_settings())
    second.resume()
    assert second.step == 3
    list(second.run())
    expected, found = weights_of(whole), weights_of(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any((found[name] != weights_of(first)[name]).any() for name in expected)
    logs = [read_log(tmp_path / name) for name in ("parts", "whole")]
    for row in logs[0] + logs[1]:
        del row["seconds"]
    assert logs[0] == logs[1] and len(logs[0]) == 2


def read_log(out: Path) -> list[dict[str, str]]:
    with (out / LOG).open(newline="") as file:
        return list(csv.DictReader(file))


def test_stored_hidden_states_train_like_recomputed_ones(target, tmp_path):
    samples = random_samples(target, 4)
    stored = store(target, samples, tmp_path / "0.safetensors")
    assert [one.tokens for one in stored] == [one.tokens for one in samples]
    losses = []
    for name, some in (("recomputed", samples), ("stored", stored)):
        run = calibration(target, some, tmp_path / name, small_settings(steps=2))
        losses.append([run.loss for _ in run.run()])
    # Padding changes the order of the target's sums, and products are in bf16.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def store(target, samples: list[Sample], path: Path) -> list[Sample]:
    """The same samples with their hidden states in a shard."""
    hidden = [target.hidden_states(torch.tensor([one.tokens]), (1, 3))[0] for one in samples]
    write_shard(path, samples, hidden)
    return read_shard(path)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """A config and a file of prompts."""
    (tmp_path / "config.toml").write_text(TOML)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path


def calibrate(target_path: Path, files: Path, *more: str) -> int:
    arguments = ["--target", str(target_path), "--out", str(files / "run"), "--device", "cpu"]
    if "--from-buffer" not in more:
        arguments += ["--prompts", str(files / "prompts.txt")]
    return cli.main(["train", "drafter", *arguments, "--config", str(files / "config.toml"), *more])


def test_the_command_writes_a_checkpoint_and_resumes(target_path, files, capsys):
    assert calibrate(target_path, files) == 0
    printed = capsys.readouterr().out
    # Without a terminal: a line for the first step, and one for the last.
    assert "train: 1/4, " in printed and "train: 4/4, " in printed
    model = files / "run/model"
    shown = re.search(r"parameters, ([\d.]+) MB in bf16; ([\d.]+) ms a pass of 4 pos", printed)
    written = (model / "model.safetensors").stat()
    assert stat.filemode(written.st_mode) == "-rw-r--r--"  # whoever serves it may read it
    # Two digits are printed, and the file has a header of some KB.
    assert abs(written.st_size / 1e6 - float(shown[1])) < 0.01 and float(shown[2]) > 0
    config, weights = read_checkpoint(model)
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3]}
    assert set(weights) == set(random_drafter(layers=1))
    card = (model / "README.md").read_text()
    assert "dllm train drafter --target target" in card and "tokens a step of the target" in card
    assert card.count("\n") <= 60
    assert str(target_path.parent) not in card and str(files) not in card
    assert len(read_log(model)) == 2

    assert calibrate(target_path, files) == 1  # holds a run
    assert "--resume" in capsys.readouterr().err
    bits = (model / "model.safetensors").read_bytes()
    lost = sorted((files / "run/responses/train").iterdir())[1]
    samples = read_shard(lost)
    lost.unlink()
    (files / "run/state.pt").unlink()
    shutil.rmtree(model)
    assert calibrate(target_path, files, "--resume") == 0
    assert read_shard(lost) == samples
    assert (model / "model.safetensors").read_bytes() == bits

    (files / "config.toml").write_text(TOML.replace("anchors = 4", "anchors = 5"))
    assert calibrate(target_path, files, "--resume") == 1
    assert "anchors = 4" in capsys.readouterr().err


def test_domains_may_have_any_name(target_path, files):
    """Those of columns, of a part of a column, of two lines."""
    domains = ["step", "loss", "length", "position_1", "two\nlines, and a comma"]
    lines = [
        {"prompt": prompt, "domain": domains[at % len(domains)]}
        for at, prompt in enumerate(PROMPTS)
    ]
    (files / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (files / "config.toml").write_text(TOML.replace("heldout = 4", "heldout = 5"))
    more = ("--prompts", str(files / "prompts.jsonl"))
    assert calibrate(target_path, files, *more) == 0
    before = read_log(files / "run")
    assert [row["step"] for row in before] == ["2", "4"]
    assert set(before[0]) >= {f"length_{domain}" for domain in domains}
    assert calibrate(target_path, files, "--resume", *more) == 0
    assert read_log(files / "run") == before


def test_a_run_goes_on_from_a_drafter_and_from_a_buffer(target_path, target, files, capsys):
    drafter, buffer = write_drafter(files / "drafter"), files / "buffer"
    buffer.mkdir()
    samples = random_samples(target, 30)
    store(target, samples[:20], buffer / "0.safetensors")
    more = ("--drafter", str(drafter), "--from-buffer", str(buffer))
    assert calibrate(target_path, files, *more) == 1
    assert "20 samples" in capsys.readouterr().err
    store(target, samples[20:], buffer / "1.safetensors")
    assert calibrate(target_path, files, *more) == 0
    _, before = read_checkpoint(drafter)
    _, after = read_checkpoint(files / "run/model")
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 0.2  # four steps from where it was
    assert "live traffic" in (files / "run/model/README.md").read_text()
    assert [row["step"] for row in read_log(files / "run")] == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 4", "steps = 0", "steps = 0; allowed"),
        ("steps = 4", "stepz = 4", "did you mean 'steps'?"),
        ("steps = 4", "gamma = -1.0", "gamma = -1.0; allowed"),
        ("steps = 4", 'hidden_states = "kept"', "hidden_states = 'kept'; allowed"),
        ("steps = 4", "temperature = 99", "temperature = 99; allowed"),
        ("heldout = 4", "heldout = 14", "14 prompts, of which heldout = 14"),
        ("[1, 3]", "[3, 1]", "drafter.target_layer_ids = [3, 1]; allowed: ascending"),
        ("[1, 3]", "[1, 4]", "which has 4 layers; allowed: 0 to 3"),
        (f"mask_token_id = {MASK}", "mask_token_id = 512", "allowed: 0 to 511"),
        ("block_size = 4", "block_size = 1", "drafter.block_size = 1; allowed"),
        ("num_layers = 1", "num_layer = 1", "did you mean 'num_layers'?"),
    ],
)
def test_bad_settings_are_refused_before_any_work(target_path, files, capsys, old, new, message):
    (files / "config.toml").write_text(TOML.replace(old, new))
    assert calibrate(target_path, files) == 1
    assert message in capsys.readouterr().err
    assert not (files / "run").exists()


def test_a_flag_names_the_mask_token_where_the_tokenizer_has_none(target_path, files, capsys):
    plain = with_fields(target_path, files / "plain", "tokenizer_config.json", mask_token=None)
    (files / "config.toml").write_text(TOML.replace(f"mask_token_id = {MASK}", ""))
    assert calibrate(plain, files) == 1
    assert "--mask-token-id" in capsys.readouterr().err
    assert calibrate(plain, files, "--mask-token-id", "<no>") == 1
    assert "mask_token_id = '<no>' is not one token" in capsys.readouterr().err
    assert calibrate(plain, files, "--mask-token-id", "7", "--steps", "1") == 0
    config, _ = read_checkpoint(files / "run/model")
    assert config["dflash_config"]["mask_token_id"] == 7


def test_a_drafter_without_block_size_has_the_block_of_a_new_one():
    assert block_of({}) == DrafterTraining().drafter.block_size
    for size in (1, "8", None):
        with pytest.raises(CommandError, match="block_size"):
            block_of({"block_size": size})


def test_a_disk_that_is_too_small_is_refused(target_path, tmp_path, monkeypatch, capsys):
    """What a resumed run wrote before the interruption counts as free."""
    arguments = ([], DrafterTraining(), new_drafter(), torch.float32)
    check_disk(tmp_path, False, *arguments)
    assert "disk: at most" in capsys.readouterr().out
    needed = 32 * count_params(new_drafter().read)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 20))
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses/0.safetensors").write_bytes(bytes(30))
    check_disk(tmp_path, True, *arguments)
    with pytest.raises(CommandError, match="free and the run may need"):
        check_disk(tmp_path, False, *arguments)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16", "text_config": {}}, torch.bfloat16),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float32"}}, torch.float32),
    ],
)
def test_the_type_of_hidden_states_may_stand_outside_the_language_models_part(
    tmp_path, config, dtype
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **config}))
    assert read_target_config(tmp_path).dtype == dtype


def test_other_mistakes_are_refused(target_path, files, capsys, tmp_path):
    (files / "prompts.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n' * 20)
    strange = shutil.copytree(target_path, tmp_path / "strange")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (strange / name).unlink()
    for where, name, message in (
        (target_path, "prompts.jsonl", 'line 2: \'{"promt": "b"}\'; allowed'),
        (target_path, "none.txt", "No such file"),
        (strange, "prompts.txt", "makes no tokens of prompt 1"),
    ):
        assert calibrate(where, files, "--prompts", str(files / name)) == 1
        assert message in capsys.readouterr().err


def test_shipped_settings_are_right_and_listed(capsys):
    for path in (*bundled_configs(), Path(__file__).parents[2] / "bench/toys/tiny-drafter.toml"):
        settings = DrafterTraining.load(Path(path))
        assert DrafterTraining.from_mapping(settings.to_mapping()) == settings
    with pytest.raises(SystemExit):
        commands.parse_drafter(["--help"])
    assert ",".join(bundled_configs()) in "".join(capsys.readouterr().out.split())


def test_sizes_that_the_config_leaves_out_are_the_targets(tmp_path):
    path = give_byte_tokenizer(write_target(tmp_path / "target", layers=6))
    (tmp_path / "config.toml").write_text('[drafter]\nnum_layers = 2\nmask_token_id = "a"\n')
    given = commands.parse_drafter(
        ["--target", str(path), "--out", str(tmp_path), "--config", str(tmp_path / "config.toml")]
    )
    found = drafter.load_drafter(given, drafter.load_settings(given), read_target_config(path))
    assert found.read.target_layer_ids == (1, 3)
    assert (found.read.num_heads, found.read.head_dim) == (4, 32)
    assert found.read.mask_token_id == AutoTokenizer.from_pretrained(path).get_vocab()["a"]
    assert found.read.rope_parameters["rope_theta"] == 10000.0


# --- responses of a server ------------------------------------------------------------------------


@pytest.mark.parametrize("returns_ids", [True, False])
def test_a_server_writes_the_responses(target_path, files, returns_ids):
    """Which are the first three tokens of each prompt; with their ids, or with a text alone."""

    def complete(asked: dict) -> dict:
        assert asked["return_token_ids"] and asked["max_tokens"] == 12, asked
        choice = {"index": 0, "text": "number", "finish_reason": "stop", "logprobs": None}
        if returns_ids:
            choice["token_ids"] = asked["prompt"][:3]
        return {"id": "x", "object": "text_completion", "model": "target", "choices": [choice]}

    with serve(Stub(str, models=("target",), key="s3cret", complete=complete)) as stub:
        assert calibrate(target_path, files, f"--from-server={stub.url}", "--api-key=s3cret") == 0
    for file in (files / "run").rglob("*"):
        assert file.is_dir() or b"s3cret" not in file.read_bytes(), file
    for sample in read_shards(files / "run/responses/train"):
        said = sample.tokens[sample.response_start :]
        if returns_ids:
            assert said == sample.tokens[:3]
        else:
            assert said[-1] == 1 and len(said) >= 2  # the text's tokens, and end-of-sequence


@pytest.mark.parametrize(
    ("name", "loaded_from", "is_taken"),
    [
        ("target", None, True),
        ("target/", None, True),
        ("other", None, False),
        ("other", "/models/target", True),
        ("other", "org/target", True),
        ("other", "/cache/models--org--target/snapshots/0123", True),
        ("target", "org/target-base", False),
    ],
)
def test_a_server_of_another_model_is_refused(tmp_path, name, loaded_from, is_taken):
    connection = Connection("http://x", name, openai.OpenAI(api_key="none"), loaded_from)
    with nullcontext() if is_taken else pytest.raises(CommandError, match="--target is"):
        refuse_other_model(connection, tmp_path / "target")


def test_the_command_asks_which_model_a_server_has(target_path, files, capsys):
    with serve(Stub(str, models=("target",), loaded_from="org/other")) as stub:
        assert calibrate(target_path, files, f"--from-server={stub.url}") == 1
    assert "serves org/other" in capsys.readouterr().err
    assert not (files / "run").exists() and not stub.requests


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "qwen3", "dtype": "bf16"}, "bf16"),
        ({"model_type": "qwen3", "dtype": "nn"}, "no readable"),
        ({"model_type": "vit"}, "vocab_size"),
    ],
)
def test_a_target_that_is_no_language_model_of_a_known_type_is_refused(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CommandError, match=named):
        target_facts(read_target_config(tmp_path))
