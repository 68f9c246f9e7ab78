"""SDAR for vLLM: its own Qwen3 and Qwen3-MoE, with block-causal heads and canvases of masks."""

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from dllm.models.sdar.settings import SDARSettings
from dllm.models.unmasking.model import UnmaskingModel


class SDARForCausalLM(UnmaskingModel, Qwen3ForCausalLM):
    """A dense SDAR; TraDo has this architecture, too."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.serve_masks(vllm_config, SDARSettings.from_vllm(vllm_config))


class SDARMoeForCausalLM(UnmaskingModel, Qwen3MoeForCausalLM):
    """An SDAR with experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.serve_masks(vllm_config, SDARSettings.from_vllm(vllm_config))
