"""vLLM's Llama, Qwen2, Qwen3 and Qwen3-MoE, with block-causal spans and canvases of masks."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm.models.unmasking.model import UnmaskingModel


class SDARForCausalLM(UnmaskingModel, Qwen3ForCausalLM):
    """A dense SDAR; TraDo has this architecture, too."""


class SDARMoeForCausalLM(UnmaskingModel, Qwen3MoeForCausalLM):
    """An SDAR with experts."""


class A2DQwen3LMHeadModel(UnmaskingModel, Qwen3ForCausalLM):
    """Tiny-A2D 0.6B."""


class A2DQwen2LMHeadModel(UnmaskingModel, Qwen2ForCausalLM):
    """Tiny-A2D 0.5B, of Qwen2.5-Coder."""


class StableDiffcoderForCausalLM(UnmaskingModel, LlamaForCausalLM):
    """Stable-DiffCoder 8B."""


class Fast_dLLM_QwenForCausalLM(UnmaskingModel, Qwen2ForCausalLM):
    """Fast-dLLM v2 1.5B and 7B."""
