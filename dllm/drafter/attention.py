"""Attention of the drafter's layers, and their context: the target's hidden states.

Nothing is run over context tokens but one projection, and nothing of them is kept but its result,
keys and values in the drafter's pages of the KV cache. The pages are written by the layer's
attention backend: on CUDA ``attention.cache_write``, as for every other model on our kernels.
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

NO_SLOT = -1  # of a token that is not to be written: a rejected draft, or padding


class DrafterAttention(nn.Module):
    """Attention of the queries; the context's keys and values are in the cache before it runs."""

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
            _anchor(self.attn)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]``; writes the queries' own keys and values, too."""
        qkv, _ = self.qkv_proj(hidden)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).flatten(1)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


def _anchor(attention: Attention) -> None:
    """Count the window from the start of the draft block, for all of its rows."""
    if attention.attn_backend.get_name() == "CPU_ATTN":
        from attention.cpu_backend import use_anchored_window

        use_anchored_window(attention)
    else:
        attention.impl.use_anchored_window()


class ContextProjection:
    """Keys and values of every layer from the target's hidden states, in one product.

    To be made when the weights are loaded and not packed yet: on a CPU vLLM packs them for its own
    product and drops the originals.
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
        skipped = first.num_heads * first.head_dim  # the queries' rows come first
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
            hidden: ``[tokens, hidden]``, behind fc.
            positions: ``[tokens]``.

        Returns:
            Two ``[layers, tokens, kv_heads, head_dim]``, keys normalized and rotated.
        """
        layers, _, heads, head_dim = self.shape
        normed = self.hidden_norm(hidden)
        flat = F.linear(normed, self.weight, self.bias) if self.weight is not None else None
        if flat is None:  # packed weights: each layer through its own quantized product
            parts = [attention.qkv_proj(normed)[0] for attention in self.attentions]
            flat = torch.cat([part[:, -2 * heads * head_dim :] for part in parts], dim=1)
        pairs = flat.view(-1, *self.shape)
        keys, values = pairs[:, :, 0], pairs[:, :, 1]
        precise = keys.float()
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        keys = (precise * scale).to(keys.dtype) * self.k_norm[:, None]
        # To RoPE, the heads of all layers are heads.
        keys, _ = self.rotary_emb(positions, keys.reshape(-1, layers * heads * head_dim), None)
        keys = keys.view(-1, layers, heads, head_dim)
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def store(
        self, keys: torch.Tensor, values: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> None:
        """Write them into each layer's pages, but for tokens at ``NO_SLOT``."""
        for attention, key, value, layer_slots in zip(
            self.attentions, keys, values, slots, strict=True
        ):
            layer = attention.attn
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, layer_slots)
