"""vLLM's Qwen2, with block-causal spans and canvases of masks."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from dllm.models.unmasking.model import UnmaskingModel


class Fast_dLLM_QwenForCausalLM(UnmaskingModel, Qwen2ForCausalLM):
    """Fast-dLLM v2 1.5B and 7B."""
