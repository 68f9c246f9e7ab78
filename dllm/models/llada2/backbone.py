"""LLaDA2 for vLLM: its own class of Ling 2.0, with block-causal heads and canvases of masks."""

from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from dllm.models.llada2.settings import LLaDA2Settings
from dllm.models.unmasking.model import UnmaskingModel


class LLaDA2MoeModelLM(UnmaskingModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0 and LLaDA2.1, mini and flash."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.serve_masks(vllm_config, LLaDA2Settings.from_vllm(vllm_config))
