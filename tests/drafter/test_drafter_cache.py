"""The drafter's KV cache beside a target's in another dtype: pages, refusals, and one engine."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, nvfp4_kv_cache_full_dim
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs, replace
from vllm.v1.worker.utils import customize_attention_spec

from dllm.drafter import cache
from dllm.drafter.cache import check_pages, refuse_cache_dtype, with_own_cache
from dllm.drafter.pair import drafter_config as read_config
from tests.support.drafter_harness import (
    assert_drafts,
    drafting_engine,
    greedy,
    plain_engine,
    prompt,
    watch_context,
    watch_drafts,
)
from tests.support.drafter_pairs import write_drafter, write_target

# --- the configuration ---------------------------------------------------------------------------


def config_of(
    dtype: str, own_dtype: str | None = None, heads: int = 8, disable_hybrid: bool = False
) -> Any:
    """The parts of a server's configuration that caches are made from; head size 128, bf16."""
    caches = CacheConfig(block_size=16, kv_cache_dtype_skip_layers=["0", "7"])
    if not dtype.startswith("turboquant"):
        caches.kv_cache_dtype_skip_layers = []  # vLLM sets them for this dtype alone
    caches.cache_dtype = dtype
    caches.kv_cache_layout = "LBNHC"  # TurboQuant's only one
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: 128,
        max_model_len=4096,
    )
    return SimpleNamespace(
        cache_config=caches,
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disable_hybrid),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=SimpleNamespace(
            kv_cache_dtype=own_dtype,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
        ),
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


def test_a_dtype_that_our_attention_cannot_keep_is_refused_at_start(tmp_path):
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    with pytest.raises(ValueError) as refusal:
        drafting_engine(target, drafter, 5, speculative={"kv_cache_dtype": "turboquant_k8v4"})
    for word in ("'turboquant_k8v4'", "fp8_e4m3", "Leave it out"):
        assert word in str(refusal.value)


def test_another_attention_backend_keeps_what_it_can():
    other = SimpleNamespace(kv_cache_dtype="nvfp4", attention_backend=SimpleNamespace(name="FA"))
    refuse_cache_dtype(other)
    other.attention_backend.name = "CUSTOM"
    with pytest.raises(ValueError, match="nvfp4"):
        refuse_cache_dtype(other)


def test_the_drafter_may_keep_what_our_backend_supports():
    pytest.importorskip("triton")
    from dllm.attention.backend import CanvasAttentionBackend

    assert list(cache.OWN_DTYPES) == CanvasAttentionBackend.supported_kv_cache_dtypes


# --- pages ---------------------------------------------------------------------------------------


class PlainBackend(TritonAttentionBackend):
    """Our backend on CUDA says the same about pages; importing it needs Triton."""


class Nvfp4Backend(PlainBackend):
    """FlashInfer's pages (vLLM 0.32, ``flashinfer.py``, ``customize_spec``); not installed here."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if not spec.kv_quant_mode.is_nvfp4 or spec.state_content_bytes is not None:
            return spec
        size = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=size)


def backend_of(dtype: str) -> type[AttentionBackend]:
    """The backend of a target's layer with this cache dtype."""
    if dtype.startswith("turboquant"):
        return TurboQuantAttentionBackend
    return Nvfp4Backend if dtype.startswith("nvfp4") else PlainBackend


def layer_spec(config: Any, dtype: str, heads: int, window: int | None = None) -> KVCacheSpec:
    """What a layer asks for, as vLLM computes it from the layer's attributes."""
    backend = backend_of(dtype)
    layer = SimpleNamespace(
        attn_backend=backend,
        kv_cache_dtype=dtype,
        kv_cache_torch_dtype=kv_cache_dtype_str_to_dtype(dtype, config.model_config),
        num_kv_heads=heads,
        head_size=128,
        head_size_v=128,
        sliding_window=window,
        attn_type=AttentionType.DECODER,
    )
    return customize_attention_spec(backend, Attention.get_kv_cache_spec(layer, config))


def specs_of(config: Any, window: int | None, draft_heads: int = 8) -> dict[str, KVCacheSpec]:
    """The specs of eight full layers of a target and three layers of a drafter."""
    caches = config.cache_config
    if caches.kv_cache_dtype_skip_layers:  # part of vLLM's start on a GPU
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.config.vllm.set_current_vllm_config", nullcontext)
            Platform._align_heterogeneous_kv_block_size(config, TurboQuantAttentionBackend)
    own = with_own_cache(config).cache_config.cache_dtype
    heads = config.model_config.get_num_kv_heads(None)
    skipped = caches.kv_cache_dtype_skip_layers
    specs = {
        f"target.{i}": layer_spec(config, own if str(i) in skipped else caches.cache_dtype, heads)
        for i in range(8)
    }
    for i in range(8, 11):
        specs[f"draft.{i}"] = layer_spec(config, own, draft_heads, window)
    return specs


def unified(config: Any, specs: dict[str, KVCacheSpec]) -> dict[str, Any]:
    """Each layer's spec after vLLM made the pages of all layers go together."""
    found = {}
    for group in get_kv_cache_groups(config, dict(specs)):
        spec = group.kv_cache_spec
        inner = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        found.update({name: inner.get(name, spec) for name in group.layer_names})
    return found


def bytes_of_target(specs: dict[str, Any]) -> float:
    """KV cache that a token takes in the target's layers."""
    target = [spec for name, spec in specs.items() if name.startswith("target")]
    return sum(spec.page_size_bytes / spec.block_size for spec in target)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``check_pages`` logs."""
    said: list[str] = []
    monkeypatch.setattr(cache.logger, "warning", lambda text, *values: said.append(text % values))
    return said


PACKED = [
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "nvfp4",
    "nvfp4_4over6",
    "int4_per_token_head",
]
FP8 = ["fp8", "fp8_e4m3", "fp8_e5m2"]


@pytest.mark.parametrize("dtype", FP8 + PACKED)
def test_full_layers_of_both_share_one_group_and_waste_nothing(dtype, warnings):
    config = config_of(dtype)
    specs = specs_of(config, window=None)
    check_pages(config, specs)
    assert len(get_kv_cache_groups(config, dict(specs))) == 1
    together = unified(config, specs)
    assert together == specs
    assert {spec.dtype for name, spec in together.items() if name[0] == "d"} == {torch.bfloat16}
    assert {spec.block_size % 16 for spec in together.values()} == {0}
    assert warnings == []


@pytest.mark.parametrize("dtype", FP8)
def test_a_window_beside_fp8_wastes_nothing(dtype, warnings):
    """A page of the target holds twice the tokens."""
    config = config_of(dtype)
    specs = specs_of(config, window=512)
    check_pages(config, specs)
    together = unified(config, specs)
    assert {spec.page_size_bytes for spec in together.values()} == {16 * 8 * 2 * 128 * 2}
    assert together["target.0"].block_size == 2 * together["draft.8"].block_size == 32
    assert bytes_of_target(together) == bytes_of_target(specs)
    assert warnings == []


@pytest.mark.parametrize("dtype", PACKED)
def test_a_window_beside_packed_pages_is_warned_of_and_the_advice_helps(dtype, warnings):
    config = config_of(dtype)
    specs = specs_of(config, window=512)
    check_pages(config, specs)
    assert bytes_of_target(unified(config, specs)) > 1.3 * bytes_of_target(specs)
    assert len(warnings) == 1 and f"--kv-cache-dtype {dtype}" in warnings[0]
    assert "--disable-hybrid-kv-cache-manager" in warnings[0]

    config = config_of(dtype, disable_hybrid=True)
    specs = specs_of(config, window=512)
    check_pages(config, specs)
    assert bytes_of_target(unified(config, specs)) == bytes_of_target(specs)
    assert len(warnings) == 1


@pytest.mark.parametrize("dtype", [name for name in PACKED if name.startswith("turboquant")])
def test_a_page_that_does_not_fit_is_refused(dtype):
    """vLLM stops there with an assertion that says nothing."""
    config = config_of(dtype)
    specs = specs_of(config, window=512, draft_heads=32)
    with pytest.raises(AssertionError):
        get_kv_cache_groups(config, copy.copy(specs))
    with pytest.raises(ValueError) as refusal:
        check_pages(config, specs)
    page = config.cache_config.skip_page_size_padded
    for word in (f"{dtype} has pages of {page} bytes", "draft.8", f"{16 * 32 * 2 * 128 * 2} bytes"):
        assert word in str(refusal.value)
    assert "Leave the drafter's window out" in str(refusal.value)
    config = config_of(dtype, disable_hybrid=True)
    specs = specs_of(config, window=512, draft_heads=32)
    check_pages(config, specs)
    assert unified(config, specs)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_worker_on_a_gpu_checks_pages_before_memory_is_taken(is_ours, monkeypatch):
    from dllm.patches import gpu_worker

    config = config_of("turboquant_4bit_nc")
    specs = specs_of(config, window=512, draft_heads=32)
    monkeypatch.setattr(gpu_worker, "drafts_with_ours", lambda speculative: is_ours)
    monkeypatch.setattr(gpu_worker.Worker, "get_kv_cache_spec", lambda self: specs)
    worker = object.__new__(gpu_worker.CanvasGPUWorker)
    worker.vllm_config = config
    if not is_ours:
        assert worker.get_kv_cache_spec() is specs
        return
    with pytest.raises(ValueError, match="turboquant_4bit_nc has pages"):
        worker.get_kv_cache_spec()


# --- an engine -----------------------------------------------------------------------------------

NUM_DRAFTS = 5
# fp32, sums in another order.
RTOL = 1e-4


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

    assert drafting.generate(prompts, greedy(24)) == plain.generate(prompts, greedy(24))

    drafting.reset_prefix_cache()
    with watch_context(drafting) as states, watch_drafts(drafting) as seen:
        drafting.generate(prompts[1:2], greedy(24))
    assert len(seen) > 10
    assert_drafts(target, read_config(drafting.runner.vllm_config), seen, states, RTOL)
