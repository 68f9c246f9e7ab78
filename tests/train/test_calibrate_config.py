"""config.json of a new drafter: z-lab's shapes, and the RoPE of its target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen3Config

from dllm.drafter.checkpoint import DrafterConfig, check_pair
from dllm.settings.command import CommandError
from dllm.settings.drafting import DrafterOptions
from dllm.train.export import drafter_config, spread_layers
from dllm.train.network import count_params
from dllm.train.settings import NEW, DrafterShape, DrafterTraining, bundled_configs
from dllm.train.target import target_facts

# Fields of config.json of Qwen/Qwen3.5-27B (its text_config) and meta-llama/Llama-3.1-8B.
QWEN: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "vocab_size": 248320,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def sizes(hidden: int, layers: int, vocab: int, intermediate: int, heads: tuple[int, int, int]):
    """Of a target; ``heads``: of queries, of keys, and their size."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "max_position_embeddings": 40960,
    }


# Name of the settings, target, and GiB of z-lab's file in bf16 (None: not known to us). Targets:
# fields of their config.json.
BUNDLED: list[tuple[str, dict[str, Any], float | None]] = [
    ("qwen3", sizes(2560, 36, 151936, 9728, (32, 8, 128)), 1.00),
    ("qwen3", sizes(4096, 36, 151936, 12288, (32, 8, 128)), 1.95),
    ("qwen3.5-9b", sizes(4096, 32, 248320, 12288, (16, 4, 256)), None),
    ("qwen3.5-27b", QWEN, 3.22),
    ("qwen3.5-35b-a3b", sizes(2048, 40, 248320, 512, (16, 2, 256)), None),
    ("llama-3.1-8b", LLAMA, 1.95),
    ("deepseek-r1-14b", sizes(5120, 48, 152064, 13824, (40, 8, 128)), None),
    ("gpt-oss-20b", sizes(2880, 24, 201088, 2880, (64, 8, 64)), 1.46),
]


def new_drafter(
    target: dict[str, Any] | PreTrainedConfig, **sizes: Any
) -> tuple[dict[str, Any], DrafterConfig]:
    """config.json of a drafter for a target, which it fits, and the same as it is read."""
    target = Qwen3Config(**target) if isinstance(target, dict) else target
    facts = target_facts(target)
    config = drafter_config(DrafterShape(mask_token_id=128002, **sizes), target, facts)
    read = DrafterConfig.from_config(config, DrafterOptions())
    check_pair(read, facts)  # sizes, vocabulary, layers, mask token, RoPE style
    return config, read


@pytest.mark.parametrize(("name", "target", "gib"), BUNDLED)
def test_a_shipped_shape_fits_its_target_and_is_as_large_as_the_released_drafter(name, target, gib):
    settings = DrafterTraining.load(Path(name))
    shape = settings.drafter
    if isinstance(shape.mask_token_id, str):
        shape = replace(shape, mask_token_id=128002)
    of_target = Qwen3Config(**target)
    facts = target_facts(of_target)
    read = DrafterConfig.from_config(drafter_config(shape, of_target, facts), DrafterOptions())
    check_pair(read, facts)
    if gib is not None:
        assert 2 * count_params(read) / 2**30 == pytest.approx(gib, abs=0.005)
    # The rest is as for a drafter of any target.
    assert replace(settings, drafter=NEW.drafter, hidden_states=NEW.hidden_states) == NEW


def test_every_shipped_config_but_our_own_is_checked():
    assert {name for name, *_ in BUNDLED} == set(bundled_configs()) - {"smollm2"}
    with pytest.raises(CommandError, match=r"did you mean 'qwen3'.*llama-3\.1-8b, qwen3, "):
        DrafterTraining.load(Path("qwen_3"))


def test_with_its_sizes_it_is_the_released_drafter():
    """Of Qwen3.5-27B, z-lab's; the rest of its fields says the same."""
    config, _ = new_drafter(QWEN, num_heads=32, num_kv_heads=8, head_dim=128)
    released = {
        "block_size": 16,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "vocab_size": 248320,
    }
    assert config | released == config
    assert config["dflash_config"]["target_layer_ids"] == [1, 16, 31, 46, 61]


# What drafters of z-lab read: of qwen3-8b, llama-3.1-8b, gpt-oss-20b, qwen3.5-35b-a3b, -122b-a10b.
@pytest.mark.parametrize(
    ("num_target_layers", "layers"),
    [
        (36, (1, 9, 17, 25, 33)),
        (32, (1, 8, 15, 22, 29)),
        (24, (1, 6, 11, 16, 21)),
        (40, (1, 6, 11, 16, 22, 27, 32, 37)),
        (48, (1, 7, 14, 20, 26, 32, 39, 45)),
        (5, (2, 3, 4)),
    ],
)
def test_layers_are_spread_by_z_labs_rule(num_target_layers, layers):
    assert spread_layers(num_target_layers, len(layers)) == layers


def test_a_scaled_rope_is_taken_over():
    _, read = new_drafter(LLAMA)
    assert read.rope_parameters.items() >= LLAMA["rope_scaling"].items()
    assert read.rope_parameters["rope_theta"] == 500000
    assert read.head_dim == 128


def test_of_several_kinds_of_layers_the_rope_is_that_of_full_attention():
    _, read = new_drafter(Gemma3TextConfig(num_hidden_layers=12))
    assert read.rope_parameters["rope_theta"] == 1_000_000


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 4.0}])
def test_what_is_about_images_or_a_part_of_a_head_is_left_out(scaling):
    rope = QWEN["rope_parameters"] | scaling
    config, read = new_drafter(QWEN | {"rope_parameters": rope})
    positions = QWEN["max_position_embeddings"]  # written out by transformers, as YaRN needs it
    given = scaling and scaling | {"original_max_position_embeddings": positions}
    assert config.get("rope_scaling", {}) == given
    assert read.rope_parameters["rope_theta"] == 10_000_000
    assert read.rope_parameters["rope_type"] == scaling.get("rope_type", "default")
    assert "mrope_section" not in read.rope_parameters
    assert "partial_rotary_factor" not in read.rope_parameters
