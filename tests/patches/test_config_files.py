"""Which config.json files are read with the plugin, and what is said about other models."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config

from dllm import register
from dllm.models import settings_of
from dllm.patches import configure
from tests.support import family_checkpoints
from tests.support.family_checkpoints import LLADA2, NEMOTRON, SDAR, STABLE_DIFFCODER, write


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    register()


def written(path: Path, config: dict[str, Any]) -> Path:
    """A directory with this config.json, which names remote code that is not there."""
    remote = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}
    (path / "config.json").write_text(json.dumps(config | remote))
    return path


def configured(path: Path, **flags: Any) -> VllmConfig:
    """The configuration of a server of this model."""
    return EngineArgs(str(path), **flags).create_engine_config()


def test_what_a_released_llada2_leaves_out_has_the_released_models_value(tmp_path):
    fields = dict(LLADA2, vocab_size=157184)
    for name in ("score_function", "n_group", "topk_group"):
        del fields[name]
    config = get_config(written(tmp_path, fields), trust_remote_code=False)
    assert (config.score_function, config.n_group, config.topk_group) == ("sigmoid", 8, 4)


def test_a_block_size_may_come_from_the_command_line(tmp_path):
    path = write(tmp_path / "model", SDAR | {"block_size": None})
    config = ModelConfig(str(path), hf_overrides={"block_size": 8})
    assert config.is_diffusion and config.hf_config.canvas_length == 8


@pytest.mark.parametrize(
    ("overrides", "length"),
    [({}, 32), ({"canvas_length": 16}, 16), ({"canvas_length": None}, None)],
)
def test_the_length_of_a_nemotrons_canvas_may_come_from_the_command_line(
    overrides, length, tmp_path
):
    config = configured(write(tmp_path / "model", NEMOTRON), hf_overrides=overrides)
    assert config.model_config.is_diffusion == (length is not None)
    assert getattr(config.diffusion_config, "canvas_length", None) == length


@pytest.mark.parametrize(
    ("name", "block_size", "mask_token_id"),
    [
        ("A2D_QWEN3", 32, 151669),
        ("A2D_QWEN2", 32, 151665),
        ("STABLE_DIFFCODER", 4, 5),
        ("FAST_DLLM", 32, 151665),
    ],
)
def test_what_a_config_does_not_say_of_blocks_has_the_released_models_value(
    name, block_size, mask_token_id, tmp_path
):
    fields = dict(getattr(family_checkpoints, name), vocab_size=151936)
    fields.pop("mask_token_id", None)
    path = str(written(tmp_path, fields))
    for overrides, expected in (({}, block_size), ({"block_size": 8}, 8)):
        config = ModelConfig(path, skip_tokenizer_init=True, hf_overrides=overrides)
        assert config.is_diffusion and config.architecture == fields["architectures"][0]
        assert config.hf_config.canvas_length == config.hf_config.block_size == expected
        assert config.hf_config.mask_token_id == mask_token_id
        assert pickle.loads(pickle.dumps(config.hf_config)).canvas_length == expected


def test_a_llama_is_a_stable_diffcoder_only_if_it_says_so(tmp_path):
    """An older upload has Llama's architecture, and the flag says what it is."""
    llama = STABLE_DIFFCODER | {"architectures": ["LlamaForCausalLM"]}
    path = str(written(tmp_path, llama))
    diffcoder = {"architectures": STABLE_DIFFCODER["architectures"]}
    for overrides, length in (({}, None), (diffcoder, 4), ({}, None)):
        config = ModelConfig(path, skip_tokenizer_init=True, hf_overrides=overrides)
        assert getattr(config.hf_config, "canvas_length", None) == length
        assert config.is_diffusion == bool(length)


def test_a_tiny_a2d_without_blocks_is_refused_by_its_name(tmp_path):
    fields = family_checkpoints.A2D_QWEN3
    path = write(tmp_path / "Qwen3-0.6B-diffusion-mdlm-v0.1", fields)
    with pytest.raises(ValueError, match="mdlm was trained without blocks"):
        configured(path)


@pytest.mark.parametrize(("block_size", "page"), [(4, 128), (32, 128), (24, 384)])
def test_pages_of_the_cache_hold_whole_blocks(block_size, page, tmp_path):
    path = write(tmp_path / "model", SDAR | {"block_size": block_size})
    assert configured(path).cache_config.block_size == page  # 128 is vLLM's default on a CPU


@pytest.mark.parametrize(("block_size", "page"), [(1, 64), (32, 64), (24, 192)])
def test_pages_on_a_gpu_hold_whole_tiles_and_blocks(block_size, page, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    cache = CacheConfig()
    configure._choose_pages(cache, block_size)
    assert (cache.block_size, cache.user_specified_block_size) == (page, True)
    given = CacheConfig(block_size=48)
    configure._choose_pages(given, 16)
    assert given.block_size == 48


def test_a_servers_mode_sets_what_is_not_set_by_itself(tmp_path):
    path = write(tmp_path / "model", LLADA2)

    def served(**generation: Any) -> tuple[float, ...]:
        found = settings_of(configured(path, override_generation_config=generation))
        return found.threshold, found.editing, found.editing_threshold, found.max_post_steps

    assert served() == served(mode="plain") == (0.95, 0, 0.5, 16)
    assert served(mode="quality") == (0.7, 1, 0.5, 16)
    assert served(mode="speed", threshold=0.6) == (0.6, 1, 0.0, 16)
    own = {"threshold": 0.8, "editing": 1}
    (path / "generation_config.json").write_text(json.dumps(own | {"mode": "speed"}))
    assert served() == (0.8, 1, 0.0, 16)
    assert served(mode="quality") == (0.7, 1, 0.5, 16)


def test_a_dflash_drafter_drafts_its_block_unless_the_user_says():
    drafter = {"method": "dflash", "model": "checkpoints/tiny-drafter"}
    for given, number in (({}, 15), ({"num_speculative_tokens": 4}, 4)):
        served = configured(Path("checkpoints/tiny-ar"), speculative_config={**drafter, **given})
        assert served.speculative_config is not None
        assert served.speculative_config.num_speculative_tokens == number
