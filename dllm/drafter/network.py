"""The drafter network for vLLM: a few Qwen3 layers whose context is the target's hidden states.

    context   cat(hidden states of the chosen target layers) -> fc -> hidden_norm
              -> keys and values of every layer in one product -> k_norm, RoPE -> KV cache pages
    queries   [last token, MASK x N] -> embedding -> layers -> norm -> the target's head

The queries attend to the context's keys and to each other. Embedding and head are the target's
unless the checkpoint has its own.

The classes are vLLM's, with four differences. A layer has the window and causality that
``checkpoint`` reads. With ``fused_context`` one kernel computes and writes the context. On a CPU
the context's keys are normalized by each layer's own weight. A checkpoint that contradicts its
config.json is refused, where vLLM loads a part of it.
Source: DFlash (arXiv 2602.06036); vLLM 0.32, ``qwen3_dflash.py``.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from dllm import LOGGER
from dllm.attention.inputs import ContextWeights
from dllm.attention.layers import bound_queries, see
from dllm.drafter.cache import with_own_cache
from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.pair import drafter_config
from dllm.ops.dispatch import CONTEXT_KV, WRONG_KERNELS
from dllm.settings.drafting import WHERE
from dllm.settings.server import options_of

logger = init_logger(LOGGER)
Weights = Mapping[str, torch.Tensor]  # by their names in a checkpoint, without "model."


class DrafterLayer(DFlashQwen3DecoderLayer):
    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        drafter: DrafterConfig,
        layer_idx: int,
        config: Any,
        cache_config: Any,
        **others: Any,
    ) -> None:
        layer, kinds = drafter.layers[layer_idx], ("full_attention", "sliding_attention")
        own = copy.copy(config)  # of a network whose layers are all like this one
        own.layer_types = [kinds[layer.mask.window is not None]] * len(drafter.layers)
        own.sliding_window = layer.mask.window
        own.is_causal = layer.is_causal
        own.dflash_config = {}
        # What vLLM's layer reads otherwise where a config leaves it out.
        own.num_key_value_heads = drafter.num_kv_heads
        own.is_neox_style = drafter.is_neox_style is not False
        # RoPE must cover the served length, also where training texts were shorter.
        own.max_position_embeddings = max(
            drafter.max_positions, vllm_config.model_config.max_model_len
        )
        cache_config = with_own_cache(vllm_config).cache_config
        super().__init__(
            vllm_config, config=own, layer_idx=layer_idx, cache_config=cache_config, **others
        )
        bound_queries(self.self_attn.attn, 1 + vllm_config.num_speculative_tokens)
        see(self.self_attn.attn, is_anchored=layer.mask.is_anchored)


class DrafterNetwork(DFlashQwen3Model):
    """Everything except the head: embedding, fc, norms and layers."""

    _fused_kv_weight: torch.Tensor | None
    context_weights: ContextWeights | None = None  # of the kernel; None: vLLM's operations serve
    fuses_context = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        drafter = drafter_config(vllm_config)
        self.decoder_layer_cls = partial(DrafterLayer, drafter=drafter)
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        self.drafter = drafter
        self.fuses_context = options_of(vllm_config).drafter.fused_context

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises ValueError if a tensor is missing, but for the embedding and the mask's row."""
        loaded: set[str] = super().load_weights(weights)
        optional = {"embed_tokens.weight", "mask_embedding"}
        missing = {name for name, _ in self.named_parameters()} - loaded - optional
        if missing:
            raise ValueError(f"The drafter's checkpoint lacks {', '.join(sorted(missing))}.")
        return loaded

    def _build_fused_kv_buffers(self) -> None:
        """Before vLLM's CPU kernels pack weights; once, as CUDA graphs know where buffers lie."""
        if self.has_context_weights:
            return
        super()._build_fused_kv_buffers()
        if self._fused_kv_weight is not None and not self._fused_kv_weight.numel():
            self._fused_kv_weight = None  # dummy weights are packed by now: each layer projects
        if self.fuses_context and CONTEXT_KV not in WRONG_KERNELS:
            self.context_weights = self._weights_of_kernel()

    def _weights_of_kernel(self) -> ContextWeights:
        """Raises ValueError for quantized weights, which the kernel cannot multiply by."""
        weight, head_dim = self._fused_kv_weight, self._head_dim
        if weight is None:
            raise ValueError(
                f"{WHERE}: fused_context with a drafter whose projections are quantized; allowed: "
                "one in 16 or 32 bits. Leave it out."
            )
        if head_dim % 2 or head_dim > ContextWeights.MAX_HEAD_SIZE:
            raise ValueError(
                f"{WHERE}: fused_context with a head size of {head_dim}; allowed: even, at most "
                f"{ContextWeights.MAX_HEAD_SIZE}. Leave it out."
            )
        cos_sin = self._rope_cos_sin_cache.to(weight.device, weight.dtype)
        norm = self._k_norm_weights, self._rms_norm_eps
        return ContextWeights(weight, self._fused_kv_bias, *norm, cos_sin, self._rope_is_neox)

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Of the output of fc, ``[tokens, hidden]``, and positions ``[tokens]``.

        ``context_slot_mapping``: of each layer ``[tokens]`` cache slots, -1 stores nothing; None
        computes without storing, for vLLM's memory profiling.
        """
        self._build_fused_kv_buffers()  # dummy weights are not loaded
        weights, tokens = self.context_weights, (context_states, context_positions)
        if weights is None:
            super().precompute_and_store_context_kv(*tokens, context_slot_mapping)
            return
        normed = torch.empty_like(context_states)
        ops.rms_norm(normed, context_states, self._hidden_norm_weight, self._rms_norm_eps)
        if context_slot_mapping is None:
            return
        from dllm.attention.context_kv import have_one_layout, write_context_kv  # needs Triton

        layers = self._attn_layers
        if all(layer.attn_backend.get_name() == "CUSTOM" for layer in layers):
            caches = [layer.impl.paged_kv(layer, layer.kv_cache) for layer in layers]
            if have_one_layout(caches):
                write_context_kv(normed, context_positions, weights, caches, context_slot_mapping)
                return
        logger.warning(
            "dllm: fused_context: the pages of the drafter's layers are not those of our attention "
            "backend, or differ. vLLM's operations compute its context."
        )
        self.context_weights = None
        super().precompute_and_store_context_kv(*tokens, context_slot_mapping)

    @property
    def has_context_weights(self) -> bool:
        return hasattr(self, "_num_attn_layers")

    def renew_context_weights(self, weights: Weights) -> None:
        """Copy a whole checkpoint's, in place: CUDA graphs have recorded where the weights lie."""
        layers, heads, head_dim = self._num_attn_layers, self._num_kv_heads, self._head_dim
        group = get_tp_group()
        for index in range(layers):
            name = f"layers.{index}.self_attn"
            self._k_norm_weights[index].copy_(weights[f"{name}.k_norm.weight"])
            if self._fused_kv_weight is None:
                continue  # quantized: the layers' own projections are used
            for part, projection in enumerate(("k_proj", "v_proj")):
                for own, kind in (
                    (self._fused_kv_weight, "weight"),
                    (self._fused_kv_bias, "bias"),
                ):
                    if own is None:
                        continue
                    whole = weights[f"{name}.{projection}.{kind}"]
                    first = group.rank_in_group * (len(whole) // head_dim) // group.world_size
                    rows = whole[first * head_dim : (first + heads) * head_dim]
                    own.view(layers, 2, len(rows), *whole.shape[1:])[index, part].copy_(rows)

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """``[layers, tokens, kv_heads, head_dim]``, each layer's by the weight of that layer.

        On a CPU in torch: vLLM's kernel there takes the first layer's weight for all.
        """
        if all_k.device.type != "cpu":
            return cast(torch.Tensor, super()._normalize_context_k(all_k))
        precise = all_k.float()
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (precise * scale).to(all_k.dtype) * self._k_norm_weights[:, None, None]


class DFlashDrafter(DFlashQwen3ForCausalLM):
    """The model class of DFlash checkpoints: vLLM's loader and speculator call its methods."""

    model_cls = DrafterNetwork
    model: DrafterNetwork
    draft_id_to_target_id: nn.Parameter | None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError if a tensor is missing; vLLM's AssertionError if its shape is wrong."""
        own = own_names(weights)
        self._loaded_shapes = {name: tensor.shape for name, tensor in own.items()}
        self._check_vocabulary(own)
        is_reload = self.model.has_context_weights
        # vLLM's loader takes the tensors of a module in one go: the network's are all at the end.
        super().load_weights(sorted(own.items(), key=lambda one: not one[0].startswith("lm_head")))
        if is_reload:
            self.model.renew_context_weights(own)

    def reload_weights(self, weights: Weights) -> None:
        """Copy another checkpoint, which ``refuse_weights`` accepts, over the weights in use.

        After an error those in use may be a mixture.
        """
        network = self.model
        parts = nn.ModuleList([network.fc, network.hidden_norm, network.norm, network.layers])
        # vLLM's loader of running servers: it packs and shards as at the first time, in place.
        initialize_layerwise_reload(parts)
        try:
            self.load_weights(weights.items())
        finally:
            finalize_layerwise_reload(parts, self.draft_model_config)

    def refuse_weights(self, weights: Weights) -> None:
        """Raises ValueError for names or shapes that differ from those in use, and for NaN."""
        found = {name: tensor.shape for name, tensor in own_names(weights.items()).items()}
        if found != self._loaded_shapes:
            odd = sorted(found.items() ^ self._loaded_shapes.items())
            raise ValueError(f"its tensors differ from those in use, for instance {odd[:2]}")
        if bad := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise ValueError(f"its tensors are not finite, for instance {bad[0]}")

    def refuse_reload(self) -> None:
        """Raises ValueError for a drafter whose weights cannot be replaced while a server runs.

        Its own embedding or head: vLLM shares it with the target if the two are equal, and the
        target's must not be written to. A reduced vocabulary and a mask row: captured CUDA graphs
        read their tensors where they lie.
        """
        found = {
            "an embedding": self.has_own_embed_tokens,
            "a head": self.has_own_lm_head,
            "a vocabulary": self.draft_id_to_target_id is not None,
            "a mask embedding": self.model.has_separate_mask_embedding,
        }
        own = [name for name, is_own in found.items() if is_own]
        if own:
            raise ValueError(
                f"renew: the drafter has {' and '.join(own)} of its own; allowed: one that shares "
                "the target's. Leave renew out."
            )

    def _check_vocabulary(self, own: Weights) -> None:
        """Check d2t: target id of a draft token = its draft id + d2t[draft id]."""
        drafter = self.model.drafter
        offsets = own.get("d2t")
        if drafter.draft_vocab_size == drafter.vocab_size and offsets is None:
            return
        if offsets is None or not any(name.startswith("lm_head.") for name in own):
            raise ValueError(
                f"The drafter drafts {drafter.draft_vocab_size} of {drafter.vocab_size} tokens, so "
                "its checkpoint needs d2t (which they are) and lm_head.weight; it lacks "
                f"{'d2t' if offsets is None else 'lm_head.weight'}."
            )
        ids = offsets.long() + torch.arange(drafter.draft_vocab_size, device=offsets.device)
        if len(ids.unique()) != len(ids) or int(ids.min()) < 0 or ids.max() >= drafter.vocab_size:
            raise ValueError(
                f"The drafter's d2t names tokens {int(ids.min())} to {int(ids.max())}, "
                f"{len(ids.unique())} different ones; allowed: {drafter.draft_vocab_size} "
                f"different ones from 0 to {drafter.vocab_size - 1}."
            )
        if self.draft_id_to_target_id is None:  # the whole vocabulary, in another order
            self.draft_id_to_target_id = nn.Parameter(offsets.to(self.lm_head.weight.device), False)


def own_names(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Without the prefix of some, and without t2d (target id -> draft id), the inverse of d2t."""
    return {name.removeprefix("model."): tensor for name, tensor in weights if "t2d" not in name}
