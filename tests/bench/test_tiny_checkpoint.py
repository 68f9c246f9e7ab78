"""The random checkpoint of the set-up, and the function that writes it and its variants."""

import filecmp
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from bench.toys.tiny import BUNDLED, tiny_config, write_checkpoint
from dllm.models.gemma.shapes import tensor_shapes
from tests.support.gemma_variants import write_variant
from tests.support.toy_prompts import SPECIAL_TOKENS, TOKEN_ID

TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED)
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `python -m bench.toys.tiny` writes it."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def load(path: Path) -> DiffusionGemmaForBlockDiffusion:
    """The reference's model in fp32; every key of the checkpoint is used, and none is missing."""
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def first_logits(model: DiffusionGemmaForBlockDiffusion) -> torch.Tensor:
    """Logits of one denoise step on a fixed prompt and canvas, [C, V]."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB_SIZE, (1, 24), generator=generator)
    canvas = torch.randint(VOCAB_SIZE, (1, 32), generator=generator)
    with torch.no_grad():
        return model(input_ids=prompt, decoder_input_ids=canvas).logits[0]


# --------------------------------------------------------------------------------------------------
# The files


def test_the_same_call_writes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    _, differ, unreadable = filecmp.cmpfiles(made, tmp_path, names, shallow=False)
    assert not differ + unreadable
    shipped = [path.name for path in BUNDLED.iterdir() if "tokenizer" in path.name]
    assert filecmp.cmpfiles(BUNDLED, made, shipped, shallow=False)[0] == shipped


def test_the_reference_loads_it(made: Path) -> None:
    model = load(made)
    config = json.loads((made / "generation_config.json").read_text())
    assert model.config.canvas_window == "anchored"
    assert model.generation_config.sampler_config.to_dict() == config["sampler_config"]
    assert model.generation_config.eos_token_id == [TOKEN_ID["<eos>"], TOKEN_ID["<turn|>"]]
    layers = zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True)
    for encoder, decoder in layers:
        assert encoder.layer_scalar != decoder.layer_scalar
        assert encoder.mlp.up_proj.weight is decoder.mlp.up_proj.weight


def test_its_logits_are_worth_testing_with(made: Path) -> None:
    """Argmax tokens differ, entropies spread, self-conditioning and the context matter."""
    logits = first_logits(load(made))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert logits.argmax(-1).unique().numel() > 20
    assert entropy.min() < 0.01
    assert entropy.max() > 0.3


# --------------------------------------------------------------------------------------------------
# Variants


def test_copies_of_the_encoder_are_those_of_the_decoder(tmp_path: Path) -> None:
    plain, copied = tmp_path / "plain", tmp_path / "copied"
    write_variant(plain)
    write_variant(copied, encoder_copies=True)
    names = load_file(copied / "model.safetensors").keys()
    extra = names - load_file(plain / "model.safetensors").keys()
    assert "model.encoder.language_model.embed_tokens.weight" in extra
    assert torch.equal(first_logits(load(copied)), first_logits(load(plain)))


def test_muted_experts_compute_nothing(tmp_path: Path) -> None:
    """Then the reference computes what a dense model does: its experts add exactly zero."""
    model = load(write_variant(tmp_path, tiny_config(dtype="float32"), mute_experts=True))
    before = first_logits(model)
    for layer in model.model.decoder.layers:
        layer.experts.gate_up_proj.data.normal_()
    assert torch.equal(first_logits(model), before)
    dense = tensor_shapes(tiny_config(num_experts=None))
    assert not [name for name in dense if "experts" in name or "router" in name]
    assert dense.keys() < tensor_shapes(tiny_config()).keys()


# --------------------------------------------------------------------------------------------------
# Tokenizer and chat template


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert all(0 <= index < VOCAB_SIZE for index in ids)
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids) == text


def test_every_byte_is_a_token() -> None:
    """Also those that no valid text has: every sequence of ids decodes."""
    vocabulary = TOKENIZER.get_vocab()
    assert len(vocabulary) == VOCAB_SIZE
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))
    assert sum(len(token) == 1 for token in vocabulary) == 256
    assert isinstance(TOKENIZER.decode(list(range(VOCAB_SIZE))), str)


def test_special_tokens_keep_their_ids() -> None:
    assert [TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(
        range(len(SPECIAL_TOKENS))
    )
    assert TOKENIZER("<|turn>user").input_ids[:2] == [TOKEN_ID["<bos>"], TOKEN_ID["<|turn>"]]
    assert TOKENIZER.decode([TOKEN_ID["<bos>"], TOKEN_ID["<eos>"]], skip_special_tokens=True) == ""


def test_the_chat_template_renders_every_role() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi, "}, {"type": "image"}]},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi,<|image|><turn|>\n"
        "<|turn>model\nHello<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )
