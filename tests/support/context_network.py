"""A drafter's network of random weights, and the steps of its context; sizes are Qwen3-8B's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dllm.attention.inputs import FP8_OF
from dllm.drafter.network import DrafterNetwork

POSITIONS = 4096  # of the table of RoPE
FP8_SCALE = 0.25  # a power of two, so that nothing is rounded


class Sizes(NamedTuple):
    """A drafter, its cache (as vLLM names its dtype) and the tokens of a step."""

    num_tokens: int
    hidden: int = 4096
    layers: int = 5
    num_kv_heads: int = 8
    head_size: int = 128
    rotary_size: int = 128
    is_neox: bool = True
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache: str = "auto"
    page_size: int = 16


class Step(NamedTuple):
    """The arguments of ``precompute_and_store_context_kv``."""

    hidden: Tensor
    positions: Tensor
    slots: list[Tensor]


def make_network(sizes: Sizes, device: str, *, is_fused: bool) -> DrafterNetwork:
    """Random weights, the same each time, and caches of zeros in vLLM's layout.

    The values of layer l are ``cached(network)[l, 1]``.
    """
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(shape, generator=random, device=device)
        return (numbers * scale).to(sizes.dtype)

    layers, heads, size = sizes.layers, sizes.num_kv_heads, sizes.head_size
    network = DrafterNetwork.__new__(DrafterNetwork)
    nn.Module.__init__(network)
    rows, half = layers * 2 * heads * size, sizes.rotary_size // 2
    angles = torch.arange(POSITIONS, device=device)[:, None] * 1e4 ** (
        -torch.arange(half, device=device) / half
    )
    made = {
        "_hidden_norm_weight": 1 + draw(sizes.hidden, scale=0.1),
        "_fused_kv_weight": draw(rows, sizes.hidden, scale=sizes.hidden**-0.5),
        "_fused_kv_bias": draw(rows) if sizes.has_bias else None,
        "_k_norm_weights": 1 + draw(layers, size, scale=0.3),
        "_rms_norm_eps": 1e-5,
        "_rope_head_size": size,
        "_rope_cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1).to(sizes.dtype),
        "_rope_is_neox": sizes.is_neox,
        "_num_attn_layers": layers,
        "_num_kv_heads": heads,
        "_head_dim": size,
        "_kv_size": heads * size,
        "_attn_layers": [_layer(sizes, device) for _ in range(layers)],
        "layers": [SimpleNamespace(self_attn=SimpleNamespace(v_scale=None))],
        "fuses_context": is_fused,
    }
    for name, value in made.items():
        setattr(network, name, value)
    network.context_weights = network._weights_of_kernel() if is_fused else None
    return network


def _layer(sizes: Sizes, device: str) -> Any:
    """What vLLM's attention layer is to a drafter's context."""
    from dllm.attention.backend import CanvasAttentionBackend, CanvasAttentionImpl

    shape = num_pages(sizes), sizes.num_kv_heads, sizes.page_size, 2 * sizes.head_size
    heads = sizes.num_kv_heads, sizes.head_size, 1.0, sizes.num_kv_heads
    scale = torch.tensor(FP8_SCALE, device=device)
    return SimpleNamespace(
        attn_backend=CanvasAttentionBackend,
        impl=CanvasAttentionImpl(*heads, kv_cache_dtype=sizes.cache),
        kv_cache=torch.zeros(
            shape, dtype=torch.uint8 if sizes.cache in FP8_OF else sizes.dtype, device=device
        ),
        _k_scale=scale,
        _v_scale=scale,
    )


def num_pages(sizes: Sizes) -> int:
    return -(-sizes.num_tokens // sizes.page_size) + 3


def make_step(sizes: Sizes, device: str) -> Step:
    """Random hidden states at random positions, whose slots are anywhere; all layers share them."""
    random = torch.Generator(device).manual_seed(1)
    shape = sizes.num_tokens, sizes.hidden
    hidden = torch.randn(shape, generator=random, device=device).to(sizes.dtype)
    positions = torch.randint(POSITIONS, shape[:1], generator=random, device=device)
    places = torch.randperm(num_pages(sizes) * sizes.page_size, generator=random, device=device)
    return Step(hidden, positions, [places[: sizes.num_tokens]] * sizes.layers)


def cached(network: DrafterNetwork) -> Tensor:
    """Everything in the caches, ``[layers, 2, slots, heads, head_size]`` fp32: keys, values."""
    found = []
    for layer in network._attn_layers:
        cache = layer.impl.paged_kv(layer, layer.kv_cache)
        unit = FP8_SCALE if cache.is_fp8 else 1.0
        found.append(unit * torch.stack([cache.key, cache.value]).float().flatten(1, 2))
    return torch.stack(found)
