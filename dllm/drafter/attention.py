"""Attention of the drafter's layers. The keys and values of their context come from ``context``."""

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
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
        from dllm.attention.cpu_backend import use_anchored_window

        use_anchored_window(attention)
    else:
        attention.impl.use_anchored_window()
