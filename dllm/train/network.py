"""The drafter network in plain torch, for training: many draft blocks of a sequence in one pass.

    context   hidden states [B, S, features] -> fc -> hidden_norm -> keys and values of every layer
    queries   [B, A, K]: A blocks of [last token, MASK x (K - 1)] -> layers -> norm -> target's head

The position of a block's first token is its *anchor*. A block sees the context in front of its
anchor, and itself; blocks do not see each other. ``dllm.drafter.network`` is the same network for
serving. Tensors have the names of z-lab's checkpoints. Source: z-lab's DFlash (arXiv 2602.06036).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding

from dllm.drafter.checkpoint import DrafterConfig, LayerAttention

INITIAL_STD = 0.02
NEVER = -100  # the label of a token that cannot be drafted, which cross_entropy leaves out
ROWS_AT_ONCE = 2048  # whose logits are in memory together

# RoPE: cosines and sines of keys ``[B, S + A * K, D]``, those of the context first.
CosSin = tuple[Tensor, Tensor]


class Norm(nn.RMSNorm):
    """RMSNorm in the precision of its input, which is bf16 under autocast, as in a server."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), self.eps)


class DraftAttention(nn.Module):
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

    def forward(self, hidden: Tensor, context: Tensor, turns: CosSin, visible: Tensor) -> Tensor:
        """Attention of ``hidden`` ``[B, A * K, H]``, normalized, to ``context`` ``[B, S, H]``.

        visible: ``[B, 1, A * K, S + A * K]`` bool, which keys a query sees.
        """
        every = torch.cat([context, hidden], 1)
        cos, sin = (part[:, context.shape[1] :] for part in turns)
        is_neox = self.config.is_neox_style is not False
        queries = rotate(self.q_norm(self._heads(self.q_proj(hidden))), (cos, sin), is_neox)
        keys = rotate(self.k_norm(self._heads(self.k_proj(every))), turns, is_neox)
        values = self._heads(self.v_proj(every))
        if not hidden.is_cpu:
            # The kernel for CUDA that takes a mask, and keeps no scores, has no groups of heads.
            shared = self.config.num_heads // self.config.num_kv_heads
            keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
        output = F.scaled_dot_product_attention(
            queries.to(values.dtype), keys.to(values.dtype), values, visible, enable_gqa=True
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _heads(self, flat: Tensor) -> Tensor:
        """``[B, heads, L, head_dim]``."""
        return flat.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class DraftLayer(nn.Module):
    """One Qwen3 layer whose keys begin with the context's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, turns: CosSin, visible: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, context, turns, visible)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftNetwork(nn.Module):
    """Everything but embedding and head, which are the target's.

    If it drafts only some tokens, it has a copy of their rows of the head, as in the speculators
    format: ``lm_head.weight``, and ``d2t``, what is to be added to a row's index for its token.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        features = config.target_hidden_size * len(config.target_layer_ids)
        self.fc = nn.Linear(features, config.hidden_size, False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in config.layers)
        self.rotary = _rotary(config)
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        self.register_buffer("d2t", None)
        if (size := config.draft_vocab_size) < config.vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, size, False).requires_grad_(False)
            self.d2t = torch.zeros(size, dtype=torch.long)

    def choose_tokens(self, tokens: Tensor, head: Tensor) -> None:
        """Draft these target tokens ``[N]`` alone, with their rows of the target's head."""
        assert self.lm_head is not None and self.d2t is not None, "it drafts every token"
        self.lm_head.weight.data.copy_(head[tokens])
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))

    def head_of(self, target_head: Tensor) -> Tensor:
        """``[N, H]``: what makes logits of its output; the target's head, unless it has its own."""
        return target_head if self.lm_head is None else self.lm_head.weight

    def as_drafted(self, tokens: Tensor) -> Tensor:
        """The rows of that head which stand for target tokens; ``NEVER`` where none does."""
        if self.d2t is None:
            return tokens
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        found = torch.full((self.config.vocab_size,), NEVER, device=tokens.device)
        found[ids] = torch.arange(len(ids), device=ids.device)
        return found[tokens]

    def initialize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * len(self.layers)) ** -0.5
        with torch.no_grad():
            for name, param in self.named_parameters():
                if not param.requires_grad:
                    continue
                if param.ndim < 2:
                    param.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INITIAL_STD * (depth if is_output else 1.0)
                param.copy_(torch.randn(param.shape, generator=generator) * std)

    @torch.no_grad()
    def fit_to_head(self, head: Tensor, head_norm: Tensor | None) -> None:
        """Make the first logits small, so that a new drafter is as unsure as it should be.

        The last norm begins as the target's, divided by the largest root mean square that the
        logits of any normalized vector can have. A smaller divisor would not do: every drafted
        position begins as the embedding of the mask, and most embeddings have much in common.

        ``head``: ``[V, H]``, the target's; some of its rows are enough. ``head_norm``: ``[H]``,
        what the target's norm in front of it multiplies by.
        """
        rows = head.float()
        weight = rows.new_ones(rows.shape[1]) if head_norm is None else head_norm.float()
        # A normalized vector has length sqrt(H).
        spread = torch.linalg.matrix_norm(rows * weight, 2) * (rows.shape[1] / len(rows)) ** 0.5
        self.norm.weight.copy_(weight / spread.clamp(min=1))

    def forward(self, features: Tensor, embeds: Tensor, anchors: Tensor) -> Tensor:
        """``[B, A, K, H]``, normalized; the target's head turns them into logits.

        Args:
            features: ``[B, S, layers * target_hidden]``, hidden states of the target.
            embeds: ``[B, A, K, H]``, embeddings of the anchor's token and the masks.
            anchors: ``[B, A]``, the position of each block's first token.
        """
        block, length = embeds.shape[2], features.shape[1]
        context = self.hidden_norm(self.fc(features))
        positions = torch.cat(
            [
                torch.arange(length, device=anchors.device).expand(len(anchors), -1),
                (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1),
            ],
            1,
        )
        turns = self.rotary(context, positions)
        hidden = embeds.flatten(1, 2)
        seen = {one: visible_keys(one, anchors, length, block) for one in set(self.config.layers)}
        for layer, attention in zip(self.layers, self.config.layers, strict=True):
            hidden = layer(hidden, context, turns, seen[attention])
        return self.norm(hidden).unflatten(1, (-1, block))


def count_params(config: DrafterConfig) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in DraftNetwork(config).parameters())


def visible_keys(layer: LayerAttention, anchors: Tensor, length: int, block: int) -> Tensor:
    """``[B, 1, A * K, S + A * K]`` bool, over the context's keys, then those of all blocks."""
    keys = torch.arange(length, device=anchors.device)
    offsets = torch.arange(block, device=anchors.device)
    rows = anchors[..., None] + offsets
    in_context = (keys < anchors[..., None, None]).expand(*rows.shape, length)
    behind = offsets[:, None] - offsets
    in_block = behind >= 0 if layer.is_causal else torch.ones_like(behind, dtype=torch.bool)
    if (window := layer.mask.window) is not None:
        first = anchors[..., None].expand_as(rows) if layer.mask.is_anchored else rows
        in_context = in_context & (first[..., None] - keys < window)
        if not layer.mask.is_anchored:
            in_block = in_block & (behind.abs() < window)
    own = torch.block_diag(*[in_block] * anchors.shape[1]).bool().expand(len(anchors), -1, -1)
    return torch.cat([in_context.flatten(1, 2), own], -1)[:, None]


def rotate(heads: Tensor, turns: CosSin, is_neox_style: bool) -> Tensor:
    """RoPE on ``[B, heads, L, head_dim]``: over the two halves, or over neighbouring pairs."""
    cos, sin = (part[:, None].to(heads.dtype) for part in turns)
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


def losses(
    hidden: Tensor, head: Tensor, labels: Tensor, rows_at_once: int = ROWS_AT_ONCE
) -> Tensor:
    """``[N]``, in nats: logits of few rows are in memory, and computed again for a gradient.

    ``hidden``: ``[N, H]``; ``head``: ``[V, H]``; ``labels``: ``[N]``, rows of the head, or
    ``NEVER``.
    """

    def part(rows: Tensor, of_rows: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, head).float(), of_rows, reduction="none")

    if len(labels) <= rows_at_once:
        return part(hidden, labels)
    pairs = zip(hidden.split(rows_at_once), labels.split(rows_at_once), strict=True)
    return torch.cat([checkpoint(part, *pair, use_reentrant=False) for pair in pairs])


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
