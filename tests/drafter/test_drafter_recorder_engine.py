"""Recording without a drafter: a plain server of tiny-ar, and a drafter trained from its buffer."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPT2Config
from vllm.config import ModelConfig

from bench.toys.suite import FAMILIES, questions
from dllm import cli
from dllm.drafter.recording import refuse_target_without_hidden_states
from dllm.drafter.samples import read_shards, recorded_layers
from dllm.settings.drafting import DrafterOptions
from dllm.train.export import read_checkpoint
from dllm.train.target import Target
from tests.support.drafter_harness import LIMITS, greedy, plain_engine
from tests.support.engine_harness import Engine, get_engine
from tests.support.toy_prompts import encode_prompt

TARGET = Path(__file__).parents[2] / "checkpoints/tiny-ar"
LAYERS, NUM_TOKENS = [1, 3, 4], 12
# fp32 sums in another order, in another batch; 3e-6 was measured.
TOLERANCE = 1e-4

CONFIG = """
steps = 3
batch_size = 4
anchors = 4
evaluate_every = 3
[drafter]
num_layers = 1
block_size = 4
num_heads = 4
num_kv_heads = 2
head_dim = 32
intermediate_size = 64
"""


def recording_engine(folder: Path, **options: object) -> Engine:
    """A server without a drafter that records; ``options`` are of the drafter object."""
    given = {"record": str(folder), "record_layers": LAYERS} | options
    return get_engine(TARGET, additional_config={"dllm": {"drafter": given}}, **LIMITS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(prompts, outputs, the folder), of 24 requests, four at a time."""
    folder = tmp_path_factory.mktemp("recorded") / "buffer"
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    asked = [*questions(FAMILIES, "heldout", 1), *questions(FAMILIES, "train", 2)][:24]
    prompts = [encode_prompt(tokenizer, each.prompt) for each in asked]
    # Longer than a step's 64 tokens: it comes in chunks.
    prompts[0] = [token for prompt in prompts[:6] for token in prompt][:150]
    engine = recording_engine(folder)
    assert engine.runner.speculator is None
    outputs = engine.generate(prompts, greedy(NUM_TOKENS))
    engine.runner.recorder.close()
    return prompts, outputs, folder


def test_the_output_is_that_of_a_server_that_does_not_record(recorded):
    prompts, outputs, _ = recorded
    assert plain_engine(TARGET).generate(prompts, greedy(NUM_TOKENS)) == outputs


def assert_recorded(
    folder: Path, path: Path, layers: list[int], prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Every request of a target at ``path`` is, with the hidden states of these layers alone."""
    found = {sample.tokens: sample for sample in read_shards(folder)}
    assert recorded_layers(folder) == [tuple(layers)]
    target = Target(path, "cpu")
    target.model.float()
    assert len(found) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        sample = found[(*prompt, *output)]
        assert sample.response_start == len(prompt)
        hidden = target.hidden_states(torch.tensor([sample.tokens[:-1]]), layers)[0]
        error = (sample.hidden()[:-1] - hidden).abs().max() / hidden.abs().max()
        assert error < TOLERANCE


def test_every_request_is_recorded_with_the_hidden_states_of_the_layers(recorded):
    prompts, outputs, folder = recorded
    assert_recorded(folder, TARGET, LAYERS, prompts, outputs)


def test_a_fresh_drafter_is_trained_from_it(recorded, tmp_path, capsys):
    _, _, folder = recorded
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    arguments = ["--target", TARGET, "--from-buffer", folder, "--config", config, "--device", "cpu"]
    run = ["train", "drafter", *map(str, arguments), "--out"]
    assert cli.main([*run, str(tmp_path / "run")]) == 0
    written, _ = read_checkpoint(tmp_path / "run/model")
    assert written["dflash_config"]["target_layer_ids"] == LAYERS  # the buffer's
    config.write_text(CONFIG + "target_layer_ids = [0, 3, 4]\n")
    assert cli.main([*run, str(tmp_path / "other")]) == 1
    assert "recorded from layers [1, 3, 4]" in capsys.readouterr().err


def test_a_target_without_hidden_states_is_refused_before_it_is_loaded(tmp_path):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    options = DrafterOptions(record="x", record_layers=[0])

    class Server:
        model_config = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
        additional_config = {"dllm": {"drafter": options}}

    with pytest.raises(ValueError, match="GPT2LMHeadModel gives no hidden states"):
        refuse_target_without_hidden_states(Server())  # type: ignore[arg-type]
