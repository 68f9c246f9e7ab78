"""The attention layers of a model that differ, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from vllm.config import VllmConfig

from dllm.attention.choice import mask_of
from dllm.settings.denoising import DenoiseSettings


@dataclass(frozen=True)
class Layer:
    """An attention layer of a model; ``context`` is of the sequences that a check tries it with."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    window: int | None = None
    is_anchored: bool = False
    block_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    context: int = 5000  # more than two parts of a split sequence

    @property
    def mask(self) -> str:
        """The name of what its rows see."""
        return mask_of(self.window, self.is_anchored, self.block_size)


def layers_of(vllm_config: VllmConfig, settings: DenoiseSettings) -> dict[str, Layer]:
    """The attention layers of a model of ours that differ, by name."""
    text = vllm_config.model_config.hf_text_config
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    full = Layer(
        heads,
        getattr(text, "num_global_key_value_heads", None) or kv_heads,
        getattr(text, "global_head_dim", None) or head_size,
        block_size=settings.block_size,
        dtype=vllm_config.model_config.dtype,
    )
    layers = {"full layers": full}
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        layers["sliding layers"] = replace(
            full,
            num_kv_heads=kv_heads,
            head_size=head_size,
            window=text.sliding_window,
            is_anchored=settings.canvas_window == "anchored",
        )
    return layers
