"""What a DFlash checkpoint says is read as it was meant, and what does not fit is refused."""

import json
from typing import Any

import pytest

from dllm.attention.masks import Mask
from dllm.drafter.checkpoint import (
    DrafterConfig,
    LayerAttention,
    TargetFacts,
    check_pair,
    check_tokenizers,
)
from dllm.settings.drafting import DrafterOptions
from dllm.settings.server import PluginOptions
from tests.support.drafter_pairs import MASK, drafter_config, speculators_config

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
TARGET = TargetFacts(hidden_size=64, num_layers=4, vocab_size=512, is_neox_style=True)
TOKENS = {"<mask>": MASK, "<other>": 7}


def read(config: dict[str, Any], **options: Any) -> DrafterConfig:
    return DrafterConfig.from_config(config, DrafterOptions(**options), TOKENS.get)


def dflash(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]} | keys}


def from_speculators(**keys: Any) -> dict[str, Any]:
    """What vLLM makes of a checkpoint in that format."""
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    given = json.loads(json.dumps(speculators_config(**keys)))
    if "layer" in given:
        given["transformer_layer_config"] |= given.pop("layer")
    translated = SpeculatorsConfig(
        **SpeculatorsConfig.extract_transformers_pre_trained_config(given)
    )
    return vars(translated) | {"model_type": translated.model_type}


def test_both_formats_describe_the_same_drafter():
    ours, theirs = read(drafter_config(num_target_layers=None)), read(from_speculators())
    assert ours == theirs
    assert ours.target_layer_ids == (1, 3)
    assert ours.layers == (LayerAttention(),) * 2


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (drafter_config(**SLIDING), (True, False)),
        (drafter_config(**SLIDING, **dflash(causal=False)), (False, False)),
        (drafter_config(**SLIDING, **dflash(causal=True)), (True, True)),
        (drafter_config(**SLIDING, is_causal=False), (False, False)),
        (drafter_config(), (False, False)),
    ],
)
def test_causality_of_the_first_format(config, causal):
    assert tuple(layer.is_causal for layer in read(config).layers) == causal


@pytest.mark.parametrize(("non_causal", "causal"), [(False, (True, False)), (True, (False, False))])
def test_full_layers_of_the_speculators_format_are_never_causal(non_causal, causal):
    config = from_speculators(sliding_window_non_causal=non_causal, layer=SLIDING)
    layers = read(config).layers
    assert tuple(layer.is_causal for layer in layers) == causal
    assert tuple(layer.mask.window for layer in layers) == (64, None)


def test_windows_of_the_checkpoint_and_of_the_server():
    sliding = read(drafter_config(**dflash(use_swa=True, swa_window_size=32)))
    assert sliding.layers[1].mask == Mask(32)
    narrow = read(drafter_config(**SLIDING, **dflash(causal=False)), window=16).layers
    assert narrow == (LayerAttention(Mask(17, True)),) * 2
    # A window of the checkpoint that is narrower stays as it is.
    wide = read(drafter_config(**SLIDING), window=100).layers
    assert wide == (LayerAttention(Mask(64), True), LayerAttention(Mask(101, True)))
    # Causal rows have no common window.
    assert read(drafter_config(**SLIDING), window=16).layers[0] == LayerAttention(Mask(17), True)


@pytest.mark.parametrize(
    "given",
    [
        (drafter_config(), {}),
        (drafter_config(), {"mask_token_id": MASK}),
        (drafter_config(), {"mask_token_id": "<mask>"}),
        (drafter_config(dflash_config={"target_layer_ids": [1], "mask_token": "<mask>"}), {}),
        (drafter_config(dflash_config={"target_layer_ids": [1]}), {"mask_token_id": MASK}),
        (drafter_config(dflash_config={"target_layer_ids": [1]}, mask_token_id=MASK), {}),
    ],
)
def test_the_mask_token_comes_from_an_option_or_the_checkpoint(given):
    config, options = given
    assert read(config, **options).mask_token_id == MASK


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (drafter_config(), {"mask_token_id": 7}, ["ambiguous", "= 500", "= 7"]),
        (drafter_config(), {"mask_token_id": "<other>"}, ["ambiguous", "'<other>' = 7", "= 500"]),
        (drafter_config(), {"mask_token_id": "<no>"}, ["mask_token_id = '<no>'", "not one token"]),
        (drafter_config(mask_token_id=9), {}, ["ambiguous", "= 500", "= 9"]),
        (drafter_config(dflash_config={"target_layer_ids": [1]}), {}, ["names no mask token"]),
        (drafter_config(**dflash(target_layer_ids=[3, 1])), {}, ["[3, 1]", "[1, 3]", "fc"]),
        (drafter_config(**dflash(target_layer_ids=[1, 1])), {}, ["[1, 1]", "[1]"]),
        (drafter_config(**dflash(target_layer_ids=[])), {}, ["target_layer_ids = []"]),
        (drafter_config(**dflash(target_layer_ids=None)), {}, ["target_layer_ids = None"]),
        (drafter_config(hidden_size="64"), {}, ["hidden_size = '64'", "int"]),
        (drafter_config(rms_norm_eps=None), {}, ["lacks 'rms_norm_eps'"]),
        (drafter_config(rope_parameters="yarn"), {}, ["rope_parameters = 'yarn'", "dict"]),
        (drafter_config(layer_types=["full_attention"]), {}, ["1 layer_types", "2"]),
        (
            drafter_config(rope_parameters={"mrope_section": [8, 4, 4]}),
            {},
            ["mrope_section", "DLLM_DISABLE"],
        ),
        (drafter_config(**dflash(sample_from_anchor=True)), {}, ["sample_from_anchor"]),
        (drafter_config(use_aux_hidden_state=False), {}, ["use_aux_hidden_state"]),
    ],
)
def test_what_cannot_be_read_is_refused(config, options, words):
    with pytest.raises(ValueError) as refusal:
        read(config, **options)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (drafter_config(target_hidden_size=96), ["size 96", "64"]),
        (drafter_config(hidden_size=32, target_hidden_size=64), ["hidden size 32", "64"]),
        (drafter_config(vocab_size=600), ["600", "512"]),
        (drafter_config(num_target_layers=36), ["36", "is 4"]),
        (drafter_config(**dflash(target_layer_ids=[1, 4])), ["layer 4", "4 layers", "0 to 3"]),
        (drafter_config(**dflash(target_layer_ids=[-1, 2])), ["layer -1", "0 to 3"]),
        (drafter_config(**dflash(mask_token_id=512)), ["512", "0 to 511"]),
        (drafter_config(**dflash(mask_token_id=-1)), ["-1", "0 to 511"]),
        (drafter_config(draft_vocab_size=600), ["600", "512"]),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(config, words):
    with pytest.raises(ValueError) as refusal:
        check_pair(read(config), TARGET)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_fitting_pair_is_not_refused():
    check_pair(read(drafter_config()), TARGET)
    for drafter in ({"a": 0}, {}, {"a": 0, "b": 1, "<mask>": 2}, {"<mask>": 5, "more": 6}):
        check_tokenizers(drafter, {"a": 0, "b": 1, "reserved": 5}, mask_token_id=5)


def test_an_unstated_rope_style_beside_an_interleaved_target_is_refused():
    interleaved = TargetFacts(64, 4, 512, is_neox_style=False)
    with pytest.raises(ValueError, match="is_neox_style"):
        check_pair(read(drafter_config()), interleaved)
    for style in (True, False):
        check_pair(read(drafter_config(is_neox_style=style)), interleaved)


def test_another_tokenizer_is_refused_with_both_ids():
    with pytest.raises(ValueError, match=r"'b' as 1, the target's as 2"):
        check_tokenizers({"a": 0, "b": 1}, {"a": 0, "b": 2}, mask_token_id=5)
    with pytest.raises(ValueError, match=r"'c' as token 2, the target's has 'b'"):
        check_tokenizers({"a": 0, "c": 2}, {"a": 0, "b": 2}, mask_token_id=5)


# --- the server's options -------------------------------------------------------------------------


def test_options_reach_the_drafter():
    options = PluginOptions.from_additional_config({"dllm": {"drafter": {"width": 3}}})
    assert options.drafter == DrafterOptions(width=3)
    assert PluginOptions.from_additional_config({}).drafter == DrafterOptions()
