"""vLLM's Llama, under the names of LLaDA-8B, and Qwen2, without a causal mask."""

import re
from collections.abc import Iterable

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm.models.llada.shapes import IN_BLOCK, OF_MODEL
from dllm.models.unmasking.model import UnmaskingModel

# In this order: of the model and of its blocks one tensor each is called ff_out.
RENAMES = WeightsMapper(
    orig_to_new_regex={
        re.compile(f"^{re.escape(name)}"): new
        for name, new in {**OF_MODEL, "model.transformer.blocks.": "model.layers."}.items()
    },
    orig_to_new_substr=IN_BLOCK,
)


class LLaDAModelLM(UnmaskingModel, LlamaForCausalLM):
    """LLaDA-8B and LLaDA-1.5."""

    hf_to_vllm_mapper = LlamaForCausalLM.hf_to_vllm_mapper | RENAMES

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(RENAMES.apply(weights))


class DreamModel(UnmaskingModel, Qwen2ForCausalLM):
    """Dream-7B and DiffuCoder."""
