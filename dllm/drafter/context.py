"""The drafter's context: the target's hidden states as keys and values of every drafter layer.

Nothing is run over context tokens but this projection, and nothing of them is kept but its result,
in the drafter's pages of the KV cache. The pages are written by the layer's attention backend: on
CUDA ``attention.cache_write``, as for every other model on our kernels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

if TYPE_CHECKING:
    from dllm.drafter.model import DrafterAttention


NO_SLOT = -1  # of a token that is not to be written: a rejected draft, or padding


class ContextProjection:
    """Keys and values of every layer from the target's hidden states, in one product.

    To be made when the weights are loaded and not packed yet: on a CPU vLLM packs them for its own
    product and drops the originals.
    """

    def __init__(self, hidden_norm: RMSNorm, attentions: Sequence["DrafterAttention"]) -> None:
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
