"""Attention of the drafter's layers, and the keys and values of their context.

The drafter's context is the target's hidden states. One projection turns them into keys and values
of every drafter layer, stored in the drafter's pages of the KV cache. No layer is run over context
tokens. Each layer's attention backend writes its pages: on CUDA ``attention.cache_write``,
as for every other model on our kernels.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope

from dllm.drafter.checkpoint import DrafterConfig, LayerAttention

NO_SLOT = -1  # cache slot of a token that is not stored: a rejected draft, or padding


class DrafterAttention(nn.Module):
    """Attention of the draft block. The context's keys and values must be in the cache before."""

    def __init__(
        self,
        config: DrafterConfig,
        layer: LayerAttention,
        cache_config: CacheConfig,
        quant_config: QuantizationConfig | None,
        max_positions: int,
        prefix: str,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.rotary_emb = get_rope(
            config.head_dim,
            max_position=max_positions,
            is_neox_style=config.is_neox_style is not False,
            rope_parameters=dict(config.rope_parameters),
        )
        self.attn = Attention(
            self.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=layer.window,
            prefix=f"{prefix}.attn",
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        if layer.is_anchored:
            _use_anchored_window(self.attn)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` to the same shape; also stores the tokens' own keys and values."""
        qkv, _ = self.qkv_proj(hidden)  # [tokens, (heads + 2 * kv_heads) * head_dim]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).flatten(1)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


def _use_anchored_window(attention: Attention) -> None:
    """Count the window from the start of the draft block, not from each of its rows."""
    if attention.attn_backend.get_name() == "CPU_ATTN":
        from attention.cpu_backend import use_anchored_window

        use_anchored_window(attention)
    else:
        attention.impl.use_anchored_window()


class ContextProjection:
    """Computes every layer's keys and values from the target's hidden states in one product.

    Make it after the weights are loaded and before vLLM packs them: on a CPU vLLM replaces the
    weights by a packed form for its own matrix product.
    """

    def __init__(self, hidden_norm: RMSNorm, attentions: Sequence[DrafterAttention]) -> None:
        self.hidden_norm = hidden_norm
        self.attentions = attentions
        first = attentions[0]
        self.rotary_emb = first.rotary_emb
        self.eps = first.k_norm.variance_epsilon
        self.shape = (len(self.attentions), 2, first.num_kv_heads, first.head_dim)
        self.k_norm = torch.stack([attention.k_norm.weight.data for attention in self.attentions])
        projections = [attention.qkv_proj for attention in self.attentions]
        skipped = first.num_heads * first.head_dim  # rows of the query projection, which come first
        self.weight = self.bias = None
        is_plain = [
            isinstance(proj.quant_method, UnquantizedLinearMethod) and proj.weight.numel() > 0
            for proj in projections
        ]
        if all(is_plain):
            self.weight = torch.cat([proj.weight.data[skipped:] for proj in projections])
            if first.qkv_proj.bias is not None:
                self.bias = torch.cat([proj.bias.data[skipped:] for proj in projections])

    def project(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of context tokens.

        Args:
            hidden: ``[tokens, hidden]``, the output of fc.
            positions: ``[tokens]``.

        Returns:
            Keys (normalized and rotated) and values, ``[layers, tokens, kv_heads, head_dim]`` each.
        """
        layers, _, heads, head_dim = self.shape
        normed = self.hidden_norm(hidden)
        flat = F.linear(normed, self.weight, self.bias) if self.weight is not None else None
        if flat is None:  # quantized or packed weights: one product for each layer
            parts = [attention.qkv_proj(normed)[0] for attention in self.attentions]
            flat = torch.cat([part[:, -2 * heads * head_dim :] for part in parts], dim=1)
        pairs = flat.view(-1, *self.shape)  # [tokens, layers, 2, kv_heads, head_dim]
        keys, values = pairs[:, :, 0], pairs[:, :, 1]
        # RMSNorm in fp32, with the weight of each layer's own k_norm.
        precise = keys.float()
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        keys = (precise * scale).to(keys.dtype) * self.k_norm[:, None]
        # One call of RoPE for all layers: it takes their heads for the heads of one layer.
        keys, _ = self.rotary_emb(positions, keys.reshape(-1, layers * heads * head_dim), None)
        keys = keys.view(-1, layers, heads, head_dim)
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def store(
        self, keys: torch.Tensor, values: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> None:
        """Write them into each layer's cache pages, except for tokens at ``NO_SLOT``.

        Args:
            keys, values: as returned by ``project``.
            slots: for each layer ``[tokens]``, the cache slots.
        """
        for attention, key, value, layer_slots in zip(
            self.attentions, keys, values, slots, strict=True
        ):
            layer = attention.attn
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, layer_slots)
