"""vLLM's Llama under the names of LLaDA-8B, without a causal mask."""

from collections.abc import Iterable

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm.models.llada.shapes import IN_BLOCK, OF_MODEL
from dllm.models.unmasking.model import UnmaskingModel

# One behind the other: of the model and of its blocks one tensor each is called ff_out.
OF_ALL = WeightsMapper(
    orig_to_new_prefix={"model.transformer.blocks.": "model.layers.", **OF_MODEL}
)
OF_BLOCKS = WeightsMapper(orig_to_new_substr=IN_BLOCK)


class LLaDAModelLM(UnmaskingModel, LlamaForCausalLM):
    """LLaDA-8B and LLaDA-1.5."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(OF_BLOCKS.apply(OF_ALL.apply(weights)))
