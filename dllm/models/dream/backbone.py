"""vLLM's Qwen2, without a causal mask."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from dllm.models.unmasking.model import UnmaskingModel


class DreamModel(UnmaskingModel, Qwen2ForCausalLM):
    """Dream-7B and DiffuCoder."""
