"""A DFlash drafter written from its definition, in fp32, for one sequence, with nothing cached.

Source: z-lab's DFlash (arXiv 2602.06036). Attention is `attention.reference`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from dllm.attention.inputs import AttentionOptions
from dllm.attention.masks import QuerySpan
from dllm.attention.reference import dense_attention
from dllm.drafter.checkpoint import DrafterConfig, LayerAttention


@dataclass
class ReferenceDrafter:
    """The target, and the drafter's tensors under the names of its checkpoint.

    fc: what ``fc`` gave in an engine whose target computes otherwise than Qwen3's: ``[hidden]`` by
        position (``watch_context``).
    """

    target: Qwen3ForCausalLM
    config: DrafterConfig
    weights: dict[str, Tensor]
    fc: Mapping[int, Tensor] | None = None

    def logits(self, tokens: Sequence[int], block: Sequence[int]) -> Tensor:
        """Logits ``[len(block), vocab]`` of a draft block behind ``tokens``.

        Args:
            tokens: those that the target has read.
            block: input ids: the newest token, which is not in ``tokens``, then masks.
        """
        context = self._context(tokens)
        hidden = self.target.model.embed_tokens(torch.tensor(block))
        for index, layer in enumerate(self.config.layers):
            hidden = self._layer(f"layers.{index}.", layer, hidden, context)
        head = self.weights.get("lm_head.weight", self.target.lm_head.weight)
        return self._norm(hidden, "norm") @ head.T

    def _context(self, tokens: Sequence[int]) -> Tensor:
        """The target's hidden states of ``tokens``, projected by ``fc``: ``[tokens, hidden]``."""
        if self.fc is not None:
            found = torch.stack([self.fc[place] for place in range(len(tokens))])
            return self._norm(found, "hidden_norm")
        outputs: dict[int, Tensor] = {}
        hooks = [
            self.target.model.layers[layer].register_forward_hook(
                lambda _module, _inputs, output, layer=layer: outputs.update({layer: output})
            )
            for layer in self.config.target_layer_ids
        ]
        self.target(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        features = torch.cat([outputs[layer][0] for layer in self.config.target_layer_ids], -1)
        return self._norm(features @ self.weights["fc.weight"].T, "hidden_norm")

    def _layer(self, name: str, layer: LayerAttention, hidden: Tensor, context: Tensor) -> Tensor:
        normed = self._norm(hidden, f"{name}input_layernorm")
        positions = torch.arange(len(context) + len(hidden))
        queries = self._heads(normed, f"{name}self_attn.q", self.config.num_heads)
        both = torch.cat([context, normed])
        keys = self._heads(both, f"{name}self_attn.k", self.config.num_kv_heads)
        values = (both @ self.weights[f"{name}self_attn.v_proj.weight"].T).unflatten(
            -1, (-1, self.config.head_dim)
        )
        span = QuerySpan(len(hidden), len(positions), layer.is_causal)
        attended = dense_attention(
            self._rotate(queries, positions[len(context) :]),
            self._rotate(keys, positions),
            values,
            span,
            AttentionOptions(self.config.head_dim**-0.5, layer.mask),
        )
        hidden = hidden + attended.flatten(1) @ self.weights[f"{name}self_attn.o_proj.weight"].T
        normed = self._norm(hidden, f"{name}post_attention_layernorm")
        gate = F.silu(normed @ self.weights[f"{name}mlp.gate_proj.weight"].T)
        up = normed @ self.weights[f"{name}mlp.up_proj.weight"].T
        return hidden + (gate * up) @ self.weights[f"{name}mlp.down_proj.weight"].T

    def _heads(self, hidden: Tensor, name: str, heads: int) -> Tensor:
        projected = hidden @ self.weights[f"{name}_proj.weight"].T
        return self._norm(projected.unflatten(-1, (heads, self.config.head_dim)), f"{name}_norm")

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return hidden * scale * self.weights[f"{name}.weight"]

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """RoPE over the two halves of each head."""
        half = self.config.head_dim // 2
        theta = float(str(self.config.rope_parameters["rope_theta"]))
        angles = positions[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
