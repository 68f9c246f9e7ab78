"""The drafter network for vLLM: a few Qwen3 layers whose context is the target's hidden states.

    context   cat(hidden states of the chosen target layers) -> fc -> hidden_norm
              -> keys and values of every layer in one product -> k_norm, RoPE -> KV cache pages
    queries   [last token, MASK x N] -> embedding -> layers -> norm -> the target's head

The queries attend to the context's keys and to each other. No layer is run over context tokens,
which have keys and values only. Embedding and head are the target's unless the checkpoint has its
own.
Source: DFlash (arXiv 2602.06036); vLLM 0.32, ``qwen3_dflash.py``, for the weight names.
"""

import io
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.model_executor.models.qwen2 import Qwen2MLP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    get_draft_quant_config,
    maybe_prefix,
)
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from dllm.drafter.attention import DrafterAttention
from dllm.drafter.cache import with_own_cache
from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.context import ContextProjection

MASK_EMBEDDING_FILE = "mask_embedding.pt"  # optional: an embedding for the mask token alone


class DrafterLayer(nn.Module):
    """One Qwen3 layer: attention and MLP, each after an RMSNorm and with a residual."""

    def __init__(self, self_attn: DrafterAttention, mlp: Qwen2MLP, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two ``[tokens, hidden]`` whose sum is the layer's output.

        The next layer's norm adds them (vLLM's fused form). The first layer has no ``residual``.
        """
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


@support_torch_compile
class DrafterNetwork(nn.Module):
    """Everything except the head: embedding, fc, norms and layers."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, config: DrafterConfig, prefix: str = "") -> None:
        super().__init__()
        quant_config = get_draft_quant_config(vllm_config)
        # vLLM keys its KV cache by the layer number in the name: ours follow the target's.
        first = vllm_config.model_config.get_total_num_hidden_layers()
        # RoPE must cover the served length, also where the drafter was trained on shorter texts.
        max_positions = max(config.max_positions, vllm_config.model_config.max_model_len)
        self.mask_token_id = config.mask_token_id
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.mask_embedding: nn.Parameter | None = None
        self.fc = ReplicatedLinear(
            config.target_hidden_size * len(config.target_layer_ids),
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList()
        cache_config = with_own_cache(vllm_config).cache_config
        self.attentions: list[DrafterAttention] = []  # one for each layer
        for index, layer in enumerate(config.layers):
            name = maybe_prefix(prefix, f"layers.{first + index}")
            attention = DrafterAttention(
                config,
                layer,
                cache_config,
                quant_config,
                max_positions,
                f"{name}.self_attn",
            )
            mlp = Qwen2MLP(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                quant_config=quant_config,
                prefix=f"{name}.mlp",
            )
            self.layers.append(DrafterLayer(attention, mlp, config))
            self.attentions.append(attention)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the queries (``[tokens]`` ids and positions): normalized ``[tokens, hidden]``."""
        hidden = self.embed_tokens(input_ids)
        if self.mask_embedding is not None:
            is_mask = (input_ids == self.mask_token_id)[:, None]
            hidden = torch.where(is_mask, self.mask_embedding.to(hidden.dtype), hidden)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class DFlashDrafter(nn.Module, SupportsEagle3):
    """The model class of DFlash checkpoints: vLLM's loader and speculator call its methods."""

    hf_to_vllm_mapper = DrafterNetwork.hf_to_vllm_mapper
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        from dllm.drafter.pair import drafter_config

        speculative = vllm_config.speculative_config
        assert speculative is not None, "the drafter is loaded for speculation"
        self.draft_model_config = speculative.draft_model_config
        self.config = self.draft_model_config.hf_config  # read by vLLM's loader
        self.drafter_config = config = drafter_config(vllm_config)
        self.model = DrafterNetwork(
            vllm_config=vllm_config, config=config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            config.draft_vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(config.draft_vocab_size, scale=config.logit_scale)
        self.draft_to_target: nn.Parameter | None = None
        self._context: ContextProjection | None = None

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """vLLM's hook: the names of the layers in the KV cache, in order."""
        return [attention.attn.layer_name for attention in self.model.attentions]

    def get_draft_attn_causal(self) -> list[bool]:
        """vLLM's hook: whether each of these layers is causal (a row sees no later row)."""
        return [layer.is_causal for layer in self.drafter_config.layers]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: None = None,
    ) -> torch.Tensor:
        """Run the queries; see ``DrafterNetwork.forward``."""
        return self.model(input_ids, positions)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fc: ``[tokens, layers * target_hidden]`` to ``[tokens, hidden]``."""
        return self.model.fc(hidden_states)

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Compute the keys and values of context tokens and store them in the drafter's pages.

        Args:
            context_states: ``[tokens, hidden]`` from ``combine_hidden_states``.
            context_positions: ``[tokens]``.
            context_slot_mapping: for each layer ``[tokens]`` cache slots; None computes without
                storing, for vLLM's memory profiling.
        """
        if self._context is None:  # load_weights is not called for dummy weights
            self._context = self._make_context()
        self._context.write(context_states, context_positions, context_slot_mapping)

    def _make_context(self) -> ContextProjection:
        return ContextProjection(self.model.hidden_norm, self.model.attentions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, target's vocab]``; -inf for tokens outside a reduced draft vocabulary."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if self.draft_to_target is None:
            return logits
        full = logits.new_full((len(logits), self.drafter_config.vocab_size), -torch.inf)
        return full.index_copy_(1, self.draft_to_target, logits)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the drafter's weights. Embedding and head may be absent: the target's are used then.

        Raises:
            ValueError: a tensor is missing or has a shape that contradicts config.json.
        """
        # t2d (target id -> draft id) is the inverse of d2t and is not needed.
        own = {_own_name(name): tensor for name, tensor in weights if "t2d" not in name}
        self._loaded_shapes = {name: tensor.shape for name, tensor in own.items()}
        self._set_vocabulary(own)
        self._set_mask_embedding()
        self.has_own_embed_tokens = "model.embed_tokens.weight" in own
        self.has_own_lm_head = "lm_head.weight" in own
        self._check_shapes(own)
        loaded = AutoWeightsLoader(self).load_weights(own.items(), mapper=self.hf_to_vllm_mapper)
        # The first two may be the target's; the others are set above.
        others = {
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.mask_embedding",
            "draft_to_target",
        }
        missing = {name for name, _ in self.named_parameters()} - loaded - others
        if missing:
            raise ValueError(f"The drafter's checkpoint lacks {', '.join(sorted(missing))}.")
        if self._context is None:
            self._context = self._make_context()
        else:
            self._context.load(own)
        return loaded | others

    def reload_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy another checkpoint of the same shape over the weights in use.

        Args:
            weights: all of its tensors, by name.

        Raises:
            ValueError: other names or shapes; the weights are then as before. After any other error
                they are a mixture.
        """
        self.refuse_renewal()
        own = {_own_name(name): tensor for name, tensor in weights.items()}
        expected = self._loaded_shapes
        found = {name: tensor.shape for name, tensor in own.items()}
        if found != expected:
            odd = sorted(found.items() ^ expected.items())
            raise ValueError(f"its tensors differ from those in use, for instance {odd[:2]}")
        network = self.model
        parts = nn.ModuleList([network.fc, network.hidden_norm, network.norm, network.layers])
        # vLLM's loader of running servers: it packs and shards as at the first time, in place.
        initialize_layerwise_reload(parts)
        try:
            self.load_weights(weights.items())
        finally:
            finalize_layerwise_reload(parts, self.draft_model_config)

    def refuse_renewal(self) -> None:
        """Refuse a drafter whose weights cannot be replaced while a server runs.

        An own embedding or head may be the target's tensors (vLLM shares equal ones), which must
        not be written to. A reduced vocabulary and a mask row lie where CUDA graphs look for them.

        Raises:
            ValueError: names what the drafter has.
        """
        found = {
            "an embedding": self.has_own_embed_tokens,
            "a head": self.has_own_lm_head,
            "a vocabulary": self.draft_to_target is not None,
            "a mask embedding": self.model.mask_embedding is not None,
        }
        own = [name for name, is_own in found.items() if is_own]
        if own:
            raise ValueError(
                f"renew: the drafter has {' and '.join(own)} of its own; allowed: one that shares "
                "the target's. Leave renew out."
            )

    def _set_vocabulary(self, own: dict[str, torch.Tensor]) -> None:
        """Set ``draft_to_target``, the target's id of each token of a reduced vocabulary.

        The checkpoint's ``d2t`` holds differences: target id = draft id + d2t[draft id].
        """
        config = self.drafter_config
        offsets = own.pop("model.d2t", None)
        if config.draft_vocab_size == config.vocab_size and offsets is None:
            return
        if offsets is None or "lm_head.weight" not in own:
            raise ValueError(
                f"The drafter drafts {config.draft_vocab_size} of {config.vocab_size} tokens, so "
                "its checkpoint needs d2t (which they are) and lm_head.weight; it lacks "
                f"{'d2t' if offsets is None else 'lm_head.weight'}."
            )
        ids = torch.arange(config.draft_vocab_size) + offsets.long()
        if len(ids.unique()) != len(ids) or int(ids.min()) < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"The drafter's d2t names tokens {int(ids.min())} to {int(ids.max())}, "
                f"{len(ids.unique())} different ones; allowed: {config.draft_vocab_size} different "
                f"ones from 0 to {config.vocab_size - 1}."
            )
        device = self.lm_head.weight.device
        self.draft_to_target = nn.Parameter(ids.to(device), requires_grad=False)

    def _set_mask_embedding(self) -> None:
        """Load the mask token's own embedding, which some checkpoints have in a separate file."""
        data = get_hf_file_bytes(
            MASK_EMBEDDING_FILE, self.draft_model_config.model, self.draft_model_config.revision
        )
        if data is None:
            return
        state = torch.load(io.BytesIO(data), weights_only=True)
        mask = self.drafter_config.mask_token_id
        if isinstance(state, dict):
            if state.get("mask_token_id", mask) != mask:
                raise ValueError(
                    f"{MASK_EMBEDDING_FILE} is of token {state['mask_token_id']}, and the "
                    f"drafter's mask token is {mask}."
                )
            state = state["embedding"]
        if state.numel() != self.drafter_config.hidden_size:
            raise ValueError(
                f"{MASK_EMBEDDING_FILE} has {state.numel()} numbers, and the drafter's hidden size "
                f"is {self.drafter_config.hidden_size}."
            )
        like = self.lm_head.weight
        row = state.reshape(-1).to(device=like.device, dtype=like.dtype)
        self.model.mask_embedding = nn.Parameter(row, requires_grad=False)

    def _check_shapes(self, own: dict[str, torch.Tensor]) -> None:
        config = self.drafter_config
        width = config.target_hidden_size * len(config.target_layer_ids)
        fc = own.get("model.fc.weight")
        if fc is not None and fc.shape != (config.hidden_size, width):
            raise ValueError(
                f"The drafter's fc.weight is {list(fc.shape)}, and its config.json asks for "
                f"[{config.hidden_size}, {width}]: {len(config.target_layer_ids)} hidden states of "
                f"size {config.target_hidden_size}."
            )
        head = own.get("lm_head.weight")
        if head is not None and head.shape != (config.draft_vocab_size, config.hidden_size):
            raise ValueError(
                f"The drafter's lm_head.weight is {list(head.shape)}, and its config.json asks for "
                f"[{config.draft_vocab_size}, {config.hidden_size}]."
            )


def _own_name(name: str) -> str:
    """A checkpoint's tensor name as ``DFlashDrafter`` has it: ``lm_head...`` or ``model....``."""
    name = name.removeprefix("model.")
    return name if name.startswith("lm_head") else f"model.{name}"
