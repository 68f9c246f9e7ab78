"""The drafter network in plain torch, for training: many draft blocks of a sequence in one pass.

    context   hidden states [B, S, features] -> fc -> hidden_norm -> keys and values of every layer
    queries   [B, A, K]: A blocks of [last token, MASK x (K - 1)] -> layers -> norm -> target's head

The position of a block's first token is its *anchor*. A block sees the context in front of its
anchor, and itself; blocks do not see each other. ``dllm.drafter.network`` is the same network for
serving. Tensors have the names of z-lab's checkpoints. Source: z-lab's DFlash (arXiv 2602.06036).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dllm.drafter.checkpoint import DrafterConfig, LayerAttention

INITIAL_STD = 0.02
SCORES_AT_ONCE = 1 << 26  # attention scores of a layer in memory at a time: 256 MB in fp32


class Turns(NamedTuple):
    """RoPE: (cosines, sines) of the context ``[B, S, D]`` and of the queries ``[B, A * K, D]``."""

    context: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]


class Visible(NamedTuple):
    """Which keys queries see: in the context ``[B, A * K, S]``, in their block ``[K, K]``."""

    context: Tensor
    block: Tensor


class Norm(nn.RMSNorm):
    """RMSNorm in the precision of its input, which is bf16 under autocast, as in a server."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., size]``."""
        return F.rms_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), self.eps)


class DraftAttention(nn.Module):
    """Attention of the blocks to the context and to themselves."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, bias = config.hidden_size, config.attention_bias
        q_size, kv_size = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        self.q_proj = nn.Linear(size, q_size, bias)
        self.k_proj = nn.Linear(size, kv_size, bias)
        self.v_proj = nn.Linear(size, kv_size, bias)
        self.o_proj = nn.Linear(q_size, size, bias)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, turns: Turns, visible: Visible) -> Tensor:
        """``hidden`` ``[B, A * K, H]``, normalized; ``context`` ``[B, S, H]``."""
        is_neox = self.config.is_neox_style is not False
        block = visible.block.shape[0]
        queries = rotate(self._heads(self.q_proj(hidden), self.q_norm), turns.queries, is_neox)
        queries = queries.unflatten(2, (self.config.num_kv_heads, -1))  # heads that share keys
        own_keys = rotate(self._heads(self.k_proj(hidden), self.k_norm), turns.queries, is_neox)
        keys = rotate(self._heads(self.k_proj(context), self.k_norm), turns.context, is_neox)
        values, own_values = self._heads(self.v_proj(context)), self._heads(self.v_proj(hidden))

        # Of few blocks at a time, and again for their gradient: all scores together may be larger
        # than the weights.
        size, num_rows = queries.shape[:2]
        num_scores = size * num_rows * self.config.num_heads * (keys.shape[1] + block)
        rows = block * max(1, num_rows // block * SCORES_AT_ONCE // num_scores)
        parts = [each.split(rows, 1) for each in (queries, own_keys, own_values, visible.context)]
        attend = partial(self._attend, keys, values, visible.block)
        if rows < num_rows and torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False)
        return self.o_proj(torch.cat([attend(*some) for some in zip(*parts, strict=True)], 1))

    def _attend(
        self,
        keys: Tensor,
        values: Tensor,
        in_block: Tensor,
        queries: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        in_context: Tensor,
    ) -> Tensor:
        """Attention of some blocks: ``[B, rows, heads * head_dim]``."""
        block = in_block.shape[0]
        blocks = queries.unflatten(1, (-1, block))
        to_context = torch.einsum("bqghd,bsgd->bghqs", queries, keys)
        to_block = torch.einsum("bakghd,bajgd->bghakj", blocks, own_keys.unflatten(1, (-1, block)))
        to_context = to_context.masked_fill(~in_context[:, None, None], -torch.inf)
        to_block = to_block.masked_fill(~in_block, -torch.inf).flatten(3, 4)
        scores = torch.cat([to_context, to_block], -1).float() * self.config.head_dim**-0.5
        weights = scores.softmax(-1).to(values.dtype)
        of_context, of_block = weights.split([keys.shape[1], block], -1)
        output = torch.einsum("bghqs,bsgd->bqghd", of_context, values)
        output = output + torch.einsum(
            "bghakj,bajgd->bakghd",
            of_block.unflatten(3, (-1, block)),
            own_values.unflatten(1, (-1, block)),
        ).flatten(1, 2)
        return output.flatten(2)

    def _heads(self, flat: Tensor, norm: nn.Module | None = None) -> Tensor:
        heads = flat.unflatten(-1, (-1, self.config.head_dim))
        return heads if norm is None else norm(heads)


class DraftMLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]``."""
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class DraftLayer(nn.Module):
    """One Qwen3 layer whose keys begin with the context's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, turns: Turns, visible: Visible) -> Tensor:
        """``[B, A * K, H]``."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, context, turns, visible)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftNetwork(nn.Module):
    """Everything but embedding and head, which are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        features = config.target_hidden_size * len(config.target_layer_ids)
        self.fc = nn.Linear(features, config.hidden_size, False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in config.layers)
        self.rotary = _rotary(config)

    def initialize(self, seed: int, head_norm: Tensor | None = None) -> None:
        """Draw the weights: normal matrices, norms of one, output projections scaled by depth.

        Args:
            head_norm: weight of the target's norm in front of the head that both share. With it
                the first logits have the size that the head was trained for.
        """
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * len(self.layers)) ** -0.5
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.ndim < 2:
                    param.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INITIAL_STD * (depth if is_output else 1.0)
                param.copy_(torch.randn(param.shape, generator=generator) * std)
            if head_norm is not None:
                self.norm.weight.copy_(head_norm)

    def reread(self, config: DrafterConfig) -> None:
        """Keep the weights, but read them with another config: causality, RoPE, mask token."""
        self.config = config
        self.rotary = _rotary(config).to(self.fc.weight.device)
        for module in self.modules():
            if isinstance(module, DraftAttention):
                module.config = config

    def forward(self, features: Tensor, embeds: Tensor, anchors: Tensor) -> Tensor:
        """Run all blocks.

        Args:
            features: ``[B, S, layers * target_hidden]``, hidden states of the target.
            embeds: ``[B, A, K, H]``, embeddings of the anchor's token and the masks.
            anchors: ``[B, A]``, the position of each block's first token.

        Returns:
            ``[B, A, K, H]``, normalized; the target's head turns them into logits.
        """
        block, length = embeds.shape[2], features.shape[1]
        context = self.hidden_norm(self.fc(features))
        offsets = torch.arange(block, device=anchors.device)
        positions = (anchors[..., None] + offsets).flatten(1)
        context_positions = torch.arange(length, device=anchors.device)[None]
        turns = Turns(self.rotary(context, context_positions), self.rotary(context, positions))
        hidden = embeds.flatten(1, 2)
        for layer, attention in zip(self.layers, self.config.layers, strict=True):
            visible = visible_keys(attention, anchors, length, block)
            hidden = layer(hidden, context, turns, visible)
        return self.norm(hidden).unflatten(1, (-1, block))


def count_params(config: DrafterConfig) -> int:
    """Parameters of a drafter's network, which is not built for it."""
    with torch.device("meta"):
        return sum(param.numel() for param in DraftNetwork(config).parameters())


def visible_keys(layer: LayerAttention, anchors: Tensor, length: int, block: int) -> Visible:
    """Which keys draft blocks see in a layer, by its causality and window."""
    keys = torch.arange(length, device=anchors.device)
    offsets = torch.arange(block, device=anchors.device)
    rows = anchors[..., None] + offsets
    in_context = (keys < anchors[..., None, None]).expand(*rows.shape, length)
    behind = offsets[:, None] - offsets
    in_block = behind >= 0 if layer.is_causal else torch.ones_like(behind, dtype=torch.bool)
    if layer.window is not None:
        first = anchors[..., None].expand_as(rows) if layer.is_anchored else rows
        in_context = in_context & (first[..., None] - keys < layer.window)
        if not layer.is_anchored:
            in_block = in_block & (behind.abs() < layer.window)
    return Visible(in_context.flatten(1, 2), in_block)


def rotate(heads: Tensor, turns: tuple[Tensor, Tensor], is_neox_style: bool) -> Tensor:
    """RoPE on ``[B, L, heads, head_dim]``: over the two halves, or over neighbouring pairs."""
    cos, sin = (part[:, :, None].to(heads.dtype) for part in turns)
    if is_neox_style:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin
    cos, sin = (part[..., : part.shape[-1] // 2] for part in (cos, sin))
    first, second = heads[..., ::2], heads[..., 1::2]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.flatten(-2)


def draft_inputs(tokens: Tensor, anchors: Tensor, block: int, mask_token_id: int) -> Tensor:
    """Token ids of the blocks ``[B, A, block]``: the anchor's token, then masks."""
    ids = tokens.new_full((*anchors.shape, block), mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)
    return ids


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, rows_at_once: int = 2048) -> Tensor:
    """Cross-entropy of each row, ``[N]`` fp32 in nats; logits of few rows are in memory at a time.

    Args:
        hidden: ``[N, H]``; head: ``[V, H]``; labels: ``[N]``.
    """

    def part(rows: Tensor, of_rows: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, head).float(), of_rows, reduction="none")

    parts = zip(hidden.split(rows_at_once), labels.split(rows_at_once), strict=True)
    if len(labels) <= rows_at_once or not torch.is_grad_enabled():
        return torch.cat([part(*pair) for pair in parts])
    return torch.cat([checkpoint(part, *pair, use_reentrant=False) for pair in parts])


def _rotary(config: DrafterConfig) -> Qwen3RotaryEmbedding:
    """Transformers' own RoPE, which knows every scaling."""
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope_parameters),
        )
    )
