"""Nemotron-Labs-Diffusion for vLLM: its own Ministral 3, with canvases of masks or without."""

from collections.abc import Iterable

import torch
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm.models.unmasking.model import UnmaskingModel


class NemotronLabsDiffusionForCausalLM(MistralForCausalLM):
    """Nemotron-Labs-Diffusion 3B, 8B and 14B, for text, as an autoregressive model."""

    hf_to_vllm_mapper = MistralForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."}
    )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        renames = WeightsMapper(orig_to_new_prefix=self.hf_to_vllm_mapper.orig_to_new_prefix)
        return super().load_weights(renames.apply(weights))


class NemotronLabsDiffusionModel(UnmaskingModel, NemotronLabsDiffusionForCausalLM):
    """Nemotron-Labs-Diffusion as a diffusion model."""
