"""SDAR for vLLM: its own Qwen3 and Qwen3-MoE, with block-causal heads and canvases of masks."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm.models.sdar.settings import SDARSettings
from dllm.models.unmasking.model import UnmaskingModel


class SDARForCausalLM(UnmaskingModel, Qwen3ForCausalLM):
    """A dense SDAR; TraDo has this architecture, too."""

    settings_class = SDARSettings


class SDARMoeForCausalLM(UnmaskingModel, Qwen3MoeForCausalLM):
    """An SDAR with experts."""

    settings_class = SDARSettings
