"""LLaDA2 for vLLM: its own class of Ling 2.0, with block-causal heads and canvases of masks."""

from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from dllm.models.llada2.settings import LLaDA2Settings
from dllm.models.unmasking.model import UnmaskingModel


class LLaDA2MoeModelLM(UnmaskingModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0 and LLaDA2.1, mini and flash."""

    settings_class = LLaDA2Settings
