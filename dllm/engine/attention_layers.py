"""The attention layers of a model that differ, from its configuration alone."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import VllmConfig

from dllm.attention.inputs import FP8_OF, Layer
from dllm.attention.masks import Mask
from dllm.settings.denoising import DenoiseSettings


def layers_of(vllm_config: VllmConfig, settings: DenoiseSettings) -> dict[str, Layer]:
    text = vllm_config.model_config.hf_text_config
    layers: dict[str, Layer] = {}
    for index, kind in enumerate(getattr(text, "layer_types", None) or ["full_attention"]):
        # Where layers differ, transformers refuses what is asked of all of them together.
        own = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
        is_sliding = kind == "sliding_attention"
        window = own.sliding_window if is_sliding else None
        heads = own.num_attention_heads
        layers.setdefault(
            "sliding layers" if is_sliding else "full layers",
            Layer(
                heads,
                own.num_key_value_heads,
                getattr(own, "head_dim", None) or own.hidden_size // heads,
                Mask(
                    window,
                    window is not None and settings.canvas_window == "anchored",
                    settings.block_size,
                ),
                vllm_config.model_config.dtype,
            ),
        )
    return {name: on_one_gpu(layer, vllm_config) for name, layer in layers.items()}


def on_one_gpu(layer: Layer, vllm_config: VllmConfig) -> Layer:
    """A layer of a whole model as a GPU of the server has it."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    cache = vllm_config.cache_config
    return replace(
        layer,
        num_heads=layer.num_heads // num_ranks,
        num_kv_heads=max(1, layer.num_kv_heads // num_ranks),
        cache_dtype=FP8_OF.get(cache.cache_dtype),
        page_size=cache.block_size or layer.page_size,
    )
