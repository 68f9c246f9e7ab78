"""The drafter's context: keys and values of all layers, from the target's hidden states.

One projection turns hidden states into keys and values of every drafter layer, stored in the
drafter's pages of the KV cache. No layer is run over context tokens. On CUDA one kernel does all of
it (``attention.context_kv``). ``project`` and ``store`` are its definition, and do the work where
the kernel cannot: on a CPU, with quantized weights, with another attention backend.

While nothing is drafted, nobody reads the context. The hidden states of such steps are only copied
(``DeferredContext``). They are projected in one matrix product when drafting starts again, or when
many tokens have collected. A step without drafting then costs almost nothing more than plain
decoding.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Attention

from dllm.drafter.step import TargetStep
from dllm.ops.dispatch import CONTEXT_KV, WRONG_KERNELS

if TYPE_CHECKING:
    from dllm.attention.context_kv import ContextWeights
    from dllm.attention.inputs import PagedKV

NO_SLOT = -1  # cache slot of a token that is not stored: a rejected draft, or padding
# Tokens that are kept at most. One product over so many tokens costs little beside the steps that
# computed them, and is small enough to run at once.
MAX_DEFERRED = 1024


class ContextProjection:
    """Computes every layer's keys and values from the target's hidden states in one product.

    Make it after the weights are loaded and before vLLM packs them: on a CPU vLLM replaces the
    weights by a packed form for its own matrix product.
    """

    def __init__(self, hidden_norm: RMSNorm, attentions: Sequence[DFlashQwen3Attention]) -> None:
        self.hidden_norm = hidden_norm
        self.attentions = attentions
        first = attentions[0]
        self.rotary_emb = first.rotary_emb
        self.eps = first.k_norm.variance_epsilon
        # [layers, keys and values, kv_heads, head_dim]: what one token's projection gives.
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
        self._kernel_weights = self._for_kernel()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over the weights of another drafter of the same shape.

        In place, because CUDA graphs have recorded where the weights lie.

        Args:
            weights: of a whole checkpoint, by their names there, without "model.".
        """
        layers, _, heads, head_dim = self.shape
        group = get_tp_group()
        for index in range(layers):
            name = f"layers.{index}.self_attn"
            self.k_norm[index].copy_(weights[f"{name}.k_norm.weight"])
            for part, projection in enumerate(("k_proj", "v_proj")):
                for own, kind in ((self.weight, "weight"), (self.bias, "bias")):
                    if own is None:  # quantized: the layers' own projections are used
                        continue
                    whole = weights[f"{name}.{projection}.{kind}"]
                    first = group.rank_in_group * (len(whole) // head_dim) // group.world_size
                    rows = whole[first * head_dim : (first + heads) * head_dim]
                    own.view(layers, 2, len(rows), *whole.shape[1:])[index, part].copy_(rows)

    def _for_kernel(self) -> "ContextWeights | None":
        """The weights as the kernel takes them; None where it cannot take them."""
        if self.weight is None or CONTEXT_KV in WRONG_KERNELS:
            return None
        rope, dtype = self.rotary_emb, self.weight.dtype
        # Some kinds of RoPE choose the angles by more than the position.
        is_plain_rope = type(rope).forward_native is RotaryEmbedding.forward_native
        is_our_cache = all(
            attention.attn.attn_backend.get_name() == "CUSTOM"
            and attention.attn.kv_cache_torch_dtype == dtype
            for attention in self.attentions
        )
        if not is_our_cache or not is_plain_rope:
            return None
        from dllm.attention.context_kv import MAX_CONTEXT_HEAD_SIZE, ContextWeights

        if self.shape[-1] % 2 or self.shape[-1] > MAX_CONTEXT_HEAD_SIZE:
            return None
        cos_sin = rope.cos_sin_cache.to(self.weight.device, dtype)
        return ContextWeights(
            self.weight, self.bias, self.k_norm, self.eps, cos_sin, rope.is_neox_style
        )

    def write(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor] | None,
    ) -> None:
        """Compute the keys and values of context tokens and store them in each layer's pages.

        Args:
            hidden: ``[tokens, hidden]``, the output of fc.
            positions: ``[tokens]``.
            slots: for each layer ``[tokens]``, the cache slots; tokens at ``NO_SLOT`` are not
                stored. None stores nothing, for vLLM's memory profiling.
        """
        if self._kernel_weights is not None:
            if slots is None:
                self.hidden_norm(hidden)  # all the memory that the kernel needs
                return
            from dllm.attention.context_kv import have_one_layout, write_context_kv

            caches = self._caches()
            if have_one_layout(caches):
                normed = self.hidden_norm(hidden)
                write_context_kv(normed, positions, self._kernel_weights, caches, slots)
                return
        keys, values = self.project(hidden, positions)
        if slots is not None:
            self.store(keys, values, slots)

    def _caches(self) -> "list[PagedKV]":
        layers = [attention.attn for attention in self.attentions]
        return [layer.impl.paged_kv(layer, layer.kv_cache) for layer in layers]

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


class Context(NamedTuple):
    """What the drafter's context of some tokens is computed from, and where it is stored."""

    features: torch.Tensor  # [tokens, layers * hidden], the target's hidden states
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [groups, tokens], cache slots; NO_SLOT for tokens that are not stored


class DeferredContext:
    """The kept steps, oldest first; ``len`` counts their tokens."""

    def __init__(self) -> None:
        self._steps: list[Context] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def admits(self, num_tokens: int) -> bool:
        """Whether there is room for a step of ``num_tokens`` more tokens."""
        return self._num_tokens + num_tokens <= MAX_DEFERRED

    def append(self, step: TargetStep, slots: torch.Tensor, groups: Sequence[int]) -> None:
        """Keep a step. Everything is copied, because the next step reuses the same buffers.

        Args:
            slots: ``[groups, tokens or more]``, cache slots in every group of the KV cache.
            groups: indices of the drafter's groups.
        """
        num_tokens = step.batch.num_tokens
        # Not by a list of groups as the index: its copy to the device would be waited for.
        kept = torch.stack([slots[group, :num_tokens] for group in groups])
        if step.batch.num_draft_tokens:
            kept.masked_fill_(step.is_rejected(), NO_SLOT)
        positions = step.batch.positions[:num_tokens].clone()
        self._steps.append(Context(step.features(), positions, kept))
        self._num_tokens += num_tokens

    def take(self) -> Context:
        """Return everything that was kept, oldest first, and forget it."""
        features, positions, slots = zip(*self._steps, strict=True)
        self._steps, self._num_tokens = [], 0
        joined = last_of_each_slot(torch.cat(slots, dim=1))
        return Context(torch.cat(features), torch.cat(positions), joined)


def last_of_each_slot(slots: torch.Tensor) -> torch.Tensor:
    """Each cache slot kept for the last of its tokens only; ``NO_SLOT`` for the others.

    When a request ends, its page may be given to another request in the next step. Then two kept
    tokens have the same slot, and a kernel that writes both in one call may leave either there.
    Sorting leaves all work on the device; ``unique`` would wait for the number of slots.

    Args:
        slots: ``[groups, tokens]``, oldest token first.
    """
    ascending, places = slots.sort(dim=1, stable=True)  # of equal slots the oldest token first
    is_followed = torch.zeros_like(slots, dtype=torch.bool)
    is_followed[:, :-1] = ascending[:, :-1] == ascending[:, 1:]
    kept = ascending.masked_fill(is_followed, NO_SLOT)
    return torch.empty_like(slots).scatter_(1, places, kept)
