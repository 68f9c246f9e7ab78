"""LLaDA2 for vLLM: its own class of Ling 2.0, with block-causal spans and canvases of masks."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from dllm import LOGGER
from dllm.models.llada2.settings import LLaDA2Settings
from dllm.models.unmasking.model import UnmaskingModel
from dllm.models.unmasking.step import Unmasking

logger = init_logger(LOGGER)


class LLaDA2MoeModelLM(UnmaskingModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0 and LLaDA2.1, mini and flash."""

    settings: LLaDA2Settings

    def make_algorithm(self, vllm_config: VllmConfig) -> Unmasking:
        if not self.settings.editing:
            logger.info(
                "Tokens are not edited. LLaDA2.1 was trained for it, and config.json does not say "
                "whether this is one: if so, its authors' modes are --override-generation-config "
                """'{"mode": "quality"}' and '{"mode": "speed"}'."""
            )
        return super().make_algorithm(vllm_config)
