"""DiffusionGemma for vLLM: a Gemma4 backbone, a self-conditioning MLP, and the LM head.

The reference has an encoder (causal) and a decoder (bidirectional). They share all weights except
one number per layer, ``layer_scalar``. Here one pass over one batch does the work of both: for each
token a boolean says whether it is a canvas token (decoder) or not (encoder). The model holds no
state of requests.
"""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm import envs
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma4 import Gemma4Model
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from dllm.attention.layers import see
from dllm.engine.compilation import maybe_compile, of_fixed_size
from dllm.models import quantized, settings_of
from dllm.models.gemma.algorithm import EntropyBound
from dllm.models.gemma.self_conditioning import SelfConditioning
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.weights import (
    LayerScalars,
    checkpoint_names,
    merge_shared_copies,
    refuse_missing,
)
from dllm.ops.dispatch import uses_sparse_product
from dllm.ops.row_stats import softcap
from dllm.settings.server import options_of

if TYPE_CHECKING:
    from dllm.engine.model_state import DiffusionModelState


@support_torch_compile
class CanvasBackbone(Gemma4Model):
    """vLLM's Gemma4 backbone with a layer scalar chosen for each token.

    The output of a layer is multiplied by its entry of ``head_scalars`` (the reference's encoder)
    for causal rows, and of ``canvas_scalars`` (its decoder) for canvas rows. The ``layer_scalar``
    of vLLM's layers stays 1.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        num_layers = self.config.num_hidden_layers
        self.head_scalars = nn.Parameter(torch.ones(num_layers), requires_grad=False)
        self.canvas_scalars = nn.Parameter(torch.ones(num_layers), requires_grad=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        is_canvas_row: torch.Tensor,
    ) -> torch.Tensor:
        """``[tokens, hidden]`` behind the final norm; ``is_canvas_row``: ``[tokens]`` bool."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        scalars = torch.where(
            is_canvas_row[:, None], self.canvas_scalars.to(hidden), self.head_scalars.to(hidden)
        )  # [tokens, layers]
        for index, layer in enumerate(self.layers):
            hidden, _ = layer(positions, hidden, None)
            hidden = hidden * scalars[:, index : index + 1]
        return self.norm(hidden)


class DiffusionGemmaForBlockDiffusion(nn.Module, SupportsLoRA, SupportsQuant):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.decoder.self_conditioning.": "self_conditioning.",
            "model.decoder.": "model.",
            "model.encoder.language_model.": "model.",
            # A checkpoint without the prefixes of encoder and decoder.
            "model.self_conditioning.": "self_conditioning.",
            # The vision tower's weights are skipped (None).
            "model.encoder.vision_tower.": None,
            "model.encoder.embed_vision.": None,
        },
    )
    _is_loaded = False
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @staticmethod
    def get_model_state_cls() -> "type[DiffusionModelState]":
        from dllm.engine.model_state import DiffusionModelState

        return DiffusionModelState

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_text_config
        # Full-attention layers have no v_proj: their values are the keys before norm and RoPE.
        config.attention_k_eq_v = True
        quantized.copy_k_proj_entries_to_v_proj(vllm_config.quant_config, config.layer_types)
        self.model = CanvasBackbone(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.final_logit_softcapping = config.final_logit_softcapping
        self._softcap = maybe_compile(softcap, vllm_config)
        self.self_conditioning = SelfConditioning(
            config.hidden_size, config.intermediate_size, config.rms_norm_eps
        )
        self._layer_scalars = LayerScalars(self.model.config.num_hidden_layers)
        self._checkpoint = vllm_config.model_config.model, vllm_config.model_config.revision
        self.settings: GemmaSettings = settings_of(vllm_config)  # type: ignore[assignment]
        for layer in self.model.layers:
            # vLLM's own backends do not have this window.
            if self.settings.canvas_window == "anchored" and layer.self_attn.is_sliding:
                see(layer.self_attn.attn, is_anchored=True)

    def make_algorithm(self, vllm_config: VllmConfig) -> EntropyBound:
        vocab_size = vllm_config.model_config.get_vocab_size()
        embedding = self.model.embed_tokens
        # The exact product needs all probabilities; the sparse one computes the few that it needs.
        option = options_of(vllm_config).soft_embedding
        is_sparse = uses_sparse_product(option, vocab_size, envs.VLLM_BATCH_INVARIANT)
        return EntropyBound(
            self.settings,
            vocab_size,
            None if is_sparse else embedding.weight.dtype,
            self.self_conditioning,
            embedding,
            self.model.normalizer,
        )

    def complete_adapter(self, loras: dict[str, LoRALayerWeights]) -> None:
        """Let an adapter of keys change the values, too, where they are the keys. In place."""
        for index, kind in enumerate(self.model.config.layer_types):
            keys = f"model.layers.{index}.self_attn.k_proj"
            if kind == "full_attention" and keys in loras:
                values = copy.deepcopy(loras[keys])
                values.module_name = keys.replace("k_proj", "v_proj")
                loras[values.module_name] = values

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scaled, ``[tokens, hidden]``."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_canvas_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``intermediate_tensors`` is always None; pipeline parallelism is refused at start."""
        if is_canvas_row is None:
            is_canvas_row = torch.zeros_like(positions, dtype=torch.bool)
        return self.model(input_ids, positions, inputs_embeds, is_canvas_row)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` fp32; soft-capping is computed in fp32, as in the reference."""
        logits, cap = self.raw_logits(hidden_states)
        return self._softcap(of_fixed_size(logits, 1), cap)

    def raw_logits(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """``[rows, vocab]`` in the model's dtype, and what they are to be soft-capped with."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        assert logits is not None, "every rank samples, so every rank gathers the logits"
        return logits, self.final_logit_softcapping

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint with one copy of the shared weights, or with two equal copies.

        Raises:
            ValueError: it names tensors: the two copies differ, one is not finite, or missing when
                the model is loaded first, or a scale of a quantized layer would make it compute
                NaN.
        """
        weights, plan = quantized.checked_weights(
            weights, self.quant_config, is_whole=not self._is_loaded
        )
        filled: set[str] = set()

        def noting_names(
            pairs: Iterable[tuple[str, torch.Tensor]],
        ) -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in pairs:
                filled.add(self.hf_to_vllm_mapper.map_name(name) or name)
                yield name, tensor

        names = None if self._is_loaded else checkpoint_names(*self._checkpoint)
        merged = merge_shared_copies(weights, self._layer_scalars, names)
        loaded = AutoWeightsLoader(self).load_weights(
            noting_names(merged),
            mapper=self.hf_to_vllm_mapper,
        )
        if not self._is_loaded:  # later a trainer may send any part of the weights
            self._is_loaded = True
            refuse_missing(
                (
                    name
                    for name, _ in self.named_parameters()
                    if not quantized.is_unused_scale(name, plan)
                ),
                filled | loaded,
                self.model.hf_to_vllm_mapper.orig_to_new_stacked,
                self.model.config.num_experts,
            )
            quantized.log_kernels(self, plan)
        return loaded
