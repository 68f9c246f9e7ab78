"""Every preset fits the config.json of its target (``targets/``, each with its source)."""

import json
from pathlib import Path
from typing import Any

import pytest

from dllm.drafter.checkpoint import DrafterConfig, check_pair
from dllm.settings.drafting import DrafterOptions
from dllm.train.drafter.presets import PRESETS, drafter_config, spread_layers
from dllm.train.drafter.target import target_facts

TARGETS = Path(__file__).parent / "targets"


def fixture_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TARGETS / f"{name}.json").read_text())
    return found


def target_config(fixture: dict[str, Any]) -> dict[str, Any]:
    """Of its language model, as the command reads it."""
    return fixture["config"].get("text_config", fixture["config"])


def test_every_preset_has_its_target_with_its_source():
    assert {path.stem for path in TARGETS.glob("*.json")} == set(PRESETS)
    assert all(fixture_of(name)["source"] for name in PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fits_its_target(name):
    fixture = fixture_of(name)
    target = target_config(fixture)
    facts = target_facts(target)
    config = drafter_config(PRESETS[name], target, facts)
    read = DrafterConfig.from_config(config, DrafterOptions(), lambda token: None)
    check_pair(read, facts)  # sizes, vocabulary, layers, mask token, RoPE style
    assert read.num_target_layers == target["num_hidden_layers"]
    assert len(read.layers) == PRESETS[name].num_layers
    assert read.num_heads % read.num_kv_heads == 0 and read.head_dim % 2 == 0

    given = target.get("rope_parameters") or target.get("rope_scaling") or {}
    rope = read.rope_parameters
    assert rope["rope_theta"] == (target.get("rope_theta") or given.get("rope_theta"))
    assert rope["rope_type"] == given.get("rope_type", "default")
    assert "mrope_section" not in rope and "partial_rotary_factor" not in rope
    if rope["rope_type"] != "default":
        assert rope.items() >= given.items()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_mask_token_is_no_token_of_a_text(name):
    fixture = fixture_of(name)
    config, tokens, mask = fixture["config"], fixture["tokens"], PRESETS[name].mask_token_id
    texts = [*config.items(), *target_config(fixture).items()]
    assert mask not in [value for key, value in texts if key.endswith("token_id")]
    assert mask > tokens["last"] if "last" in tokens else str(mask) in tokens["reserved"]


@pytest.mark.parametrize(
    "name", [name for name in sorted(PRESETS) if "drafter" in fixture_of(name)]
)
def test_a_preset_is_the_released_drafter(name):
    fixture = fixture_of(name)
    target = target_config(fixture)
    config = drafter_config(PRESETS[name], target, target_facts(target))
    released = fixture["drafter"]["config"]
    dflash = config["dflash_config"]
    assert dflash | released.pop("dflash_config", {}) == dflash
    assert config | released == config


def test_layers_are_spread_by_z_labs_rule():
    chosen = ("qwen3-8b", "llama-3.1-8b", "gpt-oss-20b", "qwen3.5-27b", "qwen3.5-35b-a3b")
    for name in (*chosen, "qwen3.5-122b-a10b", "qwen3-30b-a3b", "deepseek-r1-distill-qwen-7b"):
        layers, num_target = PRESETS[name].target_layer_ids, target_config(fixture_of(name))
        assert spread_layers(num_target["num_hidden_layers"], len(layers)) == layers, name
    assert spread_layers(5, 3) == (2, 3, 4)


def test_a_scaled_rope_is_taken_over_without_what_is_about_images():
    target = target_config(fixture_of("qwen3.5-27b"))
    target["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    config = drafter_config(PRESETS["qwen3.5-27b"], target, target_facts(target))
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    read = DrafterConfig.from_config(config, DrafterOptions(), lambda token: None)
    assert read.rope_parameters["rope_theta"] == 10_000_000
