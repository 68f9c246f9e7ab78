"""The drafter's KV cache beside a target's in another dtype: refusals, and one engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig

from dllm.drafter.cache import OWN_DTYPES, refuse_cache_dtype, with_own_cache
from tests.support.drafter_harness import (
    assert_drafts,
    drafting_engine,
    greedy,
    plain_engine,
    prompt,
    reference,
    watch_context,
    watch_drafts,
)
from tests.support.drafter_pairs import write_drafter, write_target

# --- the configuration ---------------------------------------------------------------------------


def config_of(dtype: str, own_dtype: str | None = None) -> Any:
    """The parts of a server's configuration that the drafter's cache is made from."""
    caches = CacheConfig(block_size=16)
    caches.cache_dtype = dtype
    speculative = SimpleNamespace(kv_cache_dtype=own_dtype)
    return SimpleNamespace(
        cache_config=caches, model_config="the target's", speculative_config=speculative
    )


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e5m2", "turboquant_4bit_nc", "nvfp4"])
def test_the_drafter_takes_neither_the_targets_dtype_nor_its_window(dtype):
    config = config_of(dtype)
    config.cache_config.sliding_window = 77
    own = with_own_cache(config)
    assert (own.cache_config.cache_dtype, own.cache_config.sliding_window) == ("auto", None)
    assert own.model_config is config.model_config
    assert (config.cache_config.cache_dtype, config.cache_config.sliding_window) == (dtype, 77)


def test_a_dtype_that_was_asked_for_is_kept():
    own = with_own_cache(config_of("auto", own_dtype="fp8"))
    assert own.cache_config.cache_dtype == "fp8"


def test_another_attention_backend_keeps_what_it_can():
    other = SimpleNamespace(kv_cache_dtype="nvfp4", attention_backend=SimpleNamespace(name="FA"))
    refuse_cache_dtype(other)
    other.attention_backend.name = "CUSTOM"
    with pytest.raises(ValueError, match="nvfp4"):
        refuse_cache_dtype(other)


def test_the_drafter_may_keep_what_our_backend_supports():
    pytest.importorskip("triton")
    from dllm.attention.backend import CanvasAttentionBackend

    assert list(OWN_DTYPES) == CanvasAttentionBackend.supported_kv_cache_dtypes


# --- an engine -----------------------------------------------------------------------------------

NUM_DRAFTS = 5


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's CPU kernel needs AVX-512 or AMX for an FP8 KV cache",
)
def test_an_fp8_target_drafts_with_an_fp32_drafter(tmp_path):
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter")
    plain = plain_engine(target, kv_cache_dtype="fp8")
    drafting = drafting_engine(target, drafter, NUM_DRAFTS, kv_cache_dtype="fp8")
    prompts = [prompt(3), prompt(40, 1), prompt(100, 2)]

    layers = drafting.runner.vllm_config.compilation_config.static_forward_context
    own = set(drafting.runner.speculator.model.get_draft_kv_cache_layer_names())
    dtypes = {name: layer.kv_cache.dtype for name, layer in layers.items()}
    assert {dtypes.pop(name) for name in own} == {torch.float32}
    assert set(dtypes.values()) == {torch.uint8}
    # Of which their attention makes its metadata.
    assert drafting.runner.speculator.attn_vllm_config.cache_config.cache_dtype == "auto"

    assert drafting.generate(prompts, greedy(24)) == plain.generate(prompts, greedy(24))

    drafting.reset_prefix_cache()
    with watch_context(drafting) as states, watch_drafts(drafting) as seen:
        drafting.generate(prompts[1:2], greedy(24))
    assert len(seen) > 10
    expected = reference(target, drafting)
    expected.fc = states
    assert_drafts(expected, seen)
