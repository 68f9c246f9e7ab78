"""Training: it learns, a resumed run is the run, a bad config never starts, the result loads."""

import csv
import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion

from dllm import cli
from dllm.models.gemma.weights import DECODER, ENCODER
from dllm.models.unmasking.reference import load_model
from dllm.tasks.suite import question
from dllm.tasks.tool_tokenizer import TOOL_CHAT_TEMPLATE, VOCAB_SIZE, train_tool_tokenizer
from dllm.tools.eval_report import Answer, score, total
from dllm.tools.eval_report import Run as Answered
from dllm.train.lm import command, model_card
from dllm.train.lm.autoregressive import Autoregressive
from dllm.train.lm.learner import LanguageLearner
from dllm.train.lm.objective import answer_loss
from dllm.train.lm.settings import ModelShape, TrainSettings
from dllm.train.optimizer import lr_factor, orthogonalize
from dllm.train.run import Run
from dllm.train.run_files import LOG, WEIGHTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 32, "moe_intermediate_size": 16}
SHORT = {
    "steps": 4,
    "batch_size": 2,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "validation_questions": 1,
    "families": ["compare", "report"],
}
OBJECTIVES = ("diffusion", "ar", "sdar", "llada2", "nemotron")
# Whole runs of each; those of the first are in `make test`.
RUNS = [pytest.param(name, marks=[] if name == OBJECTIVES[0] else pytest.mark.nightly)
        for name in OBJECTIVES]  # fmt: skip


def write_config(path: Path, objective: str, **fields: object) -> Path:
    sizes = TINY | {name: value for name, value in fields.items() if hasattr(ModelShape, name)}
    values = {"objective": objective} | SHORT | fields
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if name not in sizes]
    lines += ["[model]", *(f"{name} = {value}" for name, value in sizes.items())]
    path.write_text("\n".join(lines))
    return path


def objective_of(settings: TrainSettings) -> LanguageLearner:
    return command.KINDS[settings.objective][0](settings)


def run(tmp_path: Path, objective: str, name: str, *args: str) -> Path:
    config = write_config(tmp_path / f"{objective}.toml", objective)
    out = tmp_path / name
    assert cli.main(["train", objective, "--config", str(config), "--out", str(out), *args]) == 0
    return out


@pytest.fixture(scope="module", params=RUNS)
def finished(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, run(tmp_path_factory.mktemp("run"), request.param, "out")


@pytest.mark.parametrize("objective", RUNS)
def test_a_run_on_tools_has_their_tokenizer_and_template(objective, tmp_path):
    """A model of either kind; its checkpoint and its card say what it was trained on."""
    config = write_config(tmp_path / "c.toml", objective, families=["alarm", "record"])
    out = tmp_path / "out"
    assert cli.main(["train", objective, "--config", str(config), "--out", str(out)]) == 0
    assert json.loads((out / "model" / "tokenizer.json").read_text()) == json.loads(
        train_tool_tokenizer().to_str()
    )
    assert (out / "model" / "chat_template.jinja").read_text() == TOOL_CHAT_TEMPLATE
    settings = json.loads((out / "model" / "config.json").read_text())
    assert settings.get("text_config", settings)["vocab_size"] == VOCAB_SIZE
    card = (out / "model" / "README.md").read_text()
    assert "dllm/tasks/tools.py" in card and "| alarm |" in card and "| add |" not in card


def test_resumed_run_is_the_uninterrupted_one(finished, tmp_path):
    """Every bit of the weights, the optimizers and the log, but for the seconds."""
    objective, whole = finished
    config = write_config(tmp_path / "c.toml", objective)
    settings = TrainSettings.load(config)
    out = tmp_path / "out"
    first = command.open_run(settings, out, resume=False)
    assert list(first.run(stop_at=3)) == [1, 2, 3]
    # A row that was written after the last checkpoint is lost, and written again.
    (out / LOG).open("a").write((out / LOG).read_text().splitlines()[-1].replace("2,", "4,", 1))
    second = command.open_run(settings, out, resume=True)
    assert second.step == 3
    assert list(second.run()) == [4]
    a, b = (torch.load(d / "state.pt", weights_only=True) for d in (whole, out))
    assert a["step"] == b["step"] == 4 and a["learner"] == b["learner"] and a["loss"] == b["loss"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["average"], b["average"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizers"], b["optimizers"], rtol=0, atol=0)
    logs = [list(csv.DictReader((d / LOG).open())) for d in (whole, out)]
    for row in logs[0] + logs[1]:
        del row["seconds"]
    assert logs[0] == logs[1] and [row["step"] for row in logs[0]] == ["2", "4"]


def test_checkpoint_loads_in_transformers(finished):
    """No missing, unexpected or mismatched key, and the averaged weights in bf16."""
    objective, out = finished
    if objective in ("sdar", "llada2", "nemotron"):  # which transformers has under other names
        model = load_model(out / "model")
    else:
        kind = DiffusionGemmaForBlockDiffusion if objective == "diffusion" else AutoModelForCausalLM
        model, info = kind.from_pretrained(out / "model", output_loading_info=True)
        assert not any(info.values()), info
    average = torch.load(out / "state.pt", weights_only=True)["average"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.bfloat16(), average[name].bfloat16(), rtol=0, atol=0)


def test_run_documents_itself(finished):
    objective, out = finished
    card = (out / "model" / "README.md").read_text()
    assert f"dllm train {objective}" in card and '"steps": 4' in card and "| compare |" in card
    assert (out / "model" / "curve.svg").read_text().count("<svg") == 1
    assert (out / "model" / LOG).read_text() == (out / LOG).read_text()


def test_run_that_starts_from_another(finished, tmp_path):
    """The first weights are the written ones; the card says how these were trained, too."""
    objective, start = finished
    settings = TrainSettings.load(write_config(tmp_path / "c.toml", objective, seed=1))
    trainer = command.open_run(settings, tmp_path / "other", False, start / "model")
    average = torch.load(start / "state.pt", weights_only=True)["average"]
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(tensor, average[name].bfloat16().float(), rtol=0, atol=0)
    out = run(tmp_path, objective, "out", "--start-from", str(start / "model"))
    card, its = ((path / "model" / "README.md").read_text() for path in (out, start))
    digest = hashlib.sha256((start / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert digest in card and "--start-from" in card and "--start-from" not in its
    assert its.partition("## Training")[2].partition("## ")[0].strip() in card


def test_start_that_does_not_fit_is_refused(finished, tmp_path, capsys):
    """Another kind of model, other sizes, no checkpoint; nothing has been written then."""
    objective, start = finished
    other = "diffusion" if objective != "diffusion" else "ar"
    wide = write_config(tmp_path / "wide.toml", objective)
    wide.write_text(wide.read_text().replace("hidden_size = 32", "hidden_size = 64"))
    same = write_config(tmp_path / "c.toml", other)
    empty = tmp_path / "empty"
    empty.mkdir()
    for kind, config, path, message in (
        (other, same, start / "model", "allowed: a "),
        (objective, wide, start / "model", "embed_tokens.weight: copying a param with shape"),
        (objective, wide, empty, "there is no config.json"),
    ):
        arguments = [kind, "--config", str(config), "--start-from", str(path)]
        assert cli.main(["train", *arguments, "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_resumed_run_keeps_its_start(finished, tmp_path):
    """The command is that of the first part: other weights, or none, are refused."""
    objective, start = finished
    settings = TrainSettings.load(write_config(tmp_path / "c.toml", objective))
    out, mine, others = tmp_path / "out", tmp_path / "mine", tmp_path / "others"
    for copy in (mine, others):
        shutil.copytree(start / "model", copy)
    weights = load_file(others / "model.safetensors")
    weights[min(weights)] += 1
    save_file(weights, others / "model.safetensors", metadata={"format": "pt"})
    list(command.open_run(settings, out, False, mine).run(stop_at=1))
    assert command.open_run(settings, out, True, mine).step == 1
    for start_from in (others, None):
        with pytest.raises(cli.CommandError, match="was started with start_from"):
            command.open_run(settings, out, True, start_from)


def test_run_that_never_reached_a_checkpoint(finished, tmp_path):
    """It can be resumed, but not with other settings."""
    objective, start = finished
    settings = TrainSettings.load(write_config(tmp_path / "c.toml", objective))
    out = tmp_path / "out"
    first = command.open_run(settings, out, False, start / "model")
    with pytest.raises(cli.CommandError, match="--resume"):
        command.open_run(settings, out, False, start / "model")
    with pytest.raises(cli.CommandError, match="seed = 0, given is 1"):
        command.open_run(replace(settings, seed=1), out, True, start / "model")
    again = command.open_run(settings, out, True, start / "model")
    assert again.step == 0
    torch.testing.assert_close(again.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)


def test_card_holds_the_scores_with_their_interval(tmp_path):
    """As `dllm eval --output` writes them."""
    asked = [question("compare", "heldout", index) for index in range(4)]
    answers = [Answer(one.answer, 3) for one in asked[:3]] + [Answer("no", 3)]
    scored = score("compare", asked, Answered(answers, 1.0, denoise_steps=12, blocks=4))
    result = {
        "families": {"compare": scored.to_mapping()},
        "all": total([scored]).to_mapping(),
    }
    (tmp_path / "scores.json").write_text(json.dumps({"transformers": result}))
    settings = TrainSettings.load(write_config(tmp_path / "c.toml", "diffusion"))
    trainer = Run(objective_of(settings).begin(), tmp_path)
    trainer.rows = [{"step": 4, "compare": 0.5, "report": 0.0}]
    model_card.write_model_card(trainer, tmp_path, "dllm train", None)
    card = (tmp_path / "README.md").read_text()
    assert "Of 4 questions" in card
    for family in ("compare", "all"):
        assert f"| {family} | 75.0 % [30 .. 95], 3.0 steps |" in card
    assert "| add | - |" in card and "| compare | 50 % |" in card


@pytest.mark.parametrize(("flag", "rank"), [((), 3), (("--lora", "2"), 2)])
def test_the_rank_of_an_adapter_is_in_the_config_or_on_the_command_line(tmp_path, flag, rank):
    config = write_config(tmp_path / "c.toml", "sdar")
    config.write_text(f"lora_rank = 3\n{config.read_text()}")
    given = ["sdar", "--config", str(config), "--out", str(tmp_path), *flag]
    assert command.load_settings(command.parse(given)).lora_rank == rank


def test_finished_run_is_not_started_over(finished, capsys):
    objective, out = finished
    assert cli.main(["train", objective, "--out", str(out)]) == 1
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stepz": 3}, "no option 'stepz' (did you mean 'steps'?)"),
        ({"steps": 0}, "steps = 0; allowed: "),
        ({"ema": 1.0}, "ema = 1.0; allowed: "),
        ({"matrix_lr": "fast"}, "matrix_lr = 'fast'"),
        ({"families": ["ad"]}, "families = 'ad'; allowed: add, sort"),
        ({"families": ["alarm", "add"]}, "families = 'add'; allowed: weather, total, alarm"),
        ({"objective": "gan"}, "objective = 'gan'; allowed: 'diffusion', 'ar', 'sdar',"),
        ({"objective": "ar"}, "run `dllm train ar`"),
        ({"block_lengths": []}, "block_lengths = []; allowed: "),
        ({"block_lengths": [4, 0]}, "block_lengths.1 = 0; allowed: "),
        ({"wrong_tokens": 1.5}, "wrong_tokens = 1.5; allowed: "),
        ({"hidden_size": 0}, "model.hidden_size = 0; allowed: "),
        ({"canvas_length": 0}, "model.canvas_length = 0; allowed: "),
    ],
)
def test_bad_config_is_refused_before_the_first_step(tmp_path, capsys, fields, message):
    config = write_config(tmp_path / "c.toml", **({"objective": "diffusion"} | fields))
    out = tmp_path / "out"
    assert cli.main(["train", "diffusion", "--config", str(config), "--out", str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_every_allowed_width_divides_into_heads():
    for size in range(16, 520, 16):
        try:
            settings = TrainSettings("ar", model=ModelShape(hidden_size=size))
        except ValueError as error:
            assert "32, 96 or a multiple of 64" in str(error) and size not in (32, 96, 128)
            continue
        config = Autoregressive(settings).config()
        assert config["num_attention_heads"] * 32 == size
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_shipped_configs_are_valid_and_every_card_names_one():
    paths = sorted(command.CONFIGS.glob("*.toml"))
    assert all(TrainSettings.load(path).steps > 500 for path in paths)
    cards = "".join(path.read_text() for path in ROOT.glob("checkpoints/*/README.md"))
    named = re.findall(r"dllm/train/lm/configs/[\w-]+\.toml", cards)
    assert {str(path.relative_to(ROOT)) for path in paths} == set(named)


@pytest.mark.parametrize("objective", RUNS)
def test_overfits_ten_examples(objective, monkeypatch):
    """Ten questions, asked again and again, are answered right in the end."""
    settings = TrainSettings.from_mapping(
        {"objective": objective, "steps": 150, "batch_size": 10, "warmup_steps": 10, "ema": 0.9}
        | {"evaluate_every": 1000, "checkpoint_every": 1000, "families": ["compare"]}
        | {"model": {"hidden_size": 64, "num_layers": 2, "intermediate_size": 64}}
    )
    ten = [question("compare", "train", index) for index in range(10)]
    learner = objective_of(settings).begin()
    monkeypatch.setattr(learner, "draw_questions", lambda step: ten)
    monkeypatch.setattr(learner, "evaluate", lambda average: {})
    trainer = Run(learner, None)
    losses = [trainer.loss for _ in trainer.run()]
    answers = learner.answer(trainer.average, ten, seed=0)
    right = [q.is_correct(text) for q, text in zip(ten, answers.texts, strict=True)]
    assert sum(right) >= 9, (answers.texts, losses[-1])


def test_answer_loss_is_a_mean_of_means():
    """Against next-token cross-entropy, sequence by sequence."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (2, 8), generator=random)
    is_answer = torch.zeros(2, 8, dtype=torch.bool)
    is_answer[0, 3:4], is_answer[1, 2:7] = True, True
    logits = torch.randn(6, 512, generator=random)
    entropy = torch.nn.functional.cross_entropy
    expected = (entropy(logits[:1], ids[0, 3:4]) + entropy(logits[1:], ids[1, 2:7])) / 2
    torch.testing.assert_close(answer_loss(logits, ids, is_answer), expected)


def test_orthogonalize_keeps_singular_vectors():
    """The singular values come near 1 (the iteration overshoots by design), tall and wide."""
    for shape in ((3, 8, 20), (2, 20, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        u, _, vt = torch.linalg.svd(x, full_matrices=False)
        values = (u.mT @ orthogonalize(x) @ vt.mT).diagonal(dim1=-2, dim2=-1)
        assert values.min() > 0.6 and values.max() < 1.3


def test_learning_rate_schedule():
    settings = TrainSettings("ar", steps=1000, warmup_steps=10, decay_from=0.5, final_lr=0.02)
    assert lr_factor(0, settings) == pytest.approx(0.1)
    assert lr_factor(10, settings) == lr_factor(500, settings) == 1.0
    assert lr_factor(750, settings) == pytest.approx(0.51)
    assert lr_factor(1000, settings) == pytest.approx(0.02)


@pytest.mark.parametrize("objective", ["diffusion", "sdar"])
def test_an_adapter_changes_matrices_of_the_checkpoint_that_it_starts_from(objective, tmp_path):
    """Under the names of the checkpoint; DiffusionGemma's halves, which share them, have one."""
    base = run(tmp_path, objective, "base") / "model"
    given = ("--lora", "2", "--start-from", str(base))
    adapter = run(tmp_path, objective, "adapter", *given) / "model"
    parts, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / WEIGHTS)
    for name, part in parts.items():
        layer, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        rows, columns = weights[f"{layer}.weight".replace(ENCODER, DECODER)].shape
        assert part.shape == ((2, columns) if kind == "A.weight" else (rows, 2))
        assert part.abs().max() > 0
    assert len(parts) == 2 * sum(
        ".layers." in name and "vision" not in name and name.endswith("_proj.weight")
        for name in weights
    )
    assert not (adapter / WEIGHTS).exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 2
