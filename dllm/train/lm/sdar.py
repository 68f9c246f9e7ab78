"""SDAR: masked blocks on Qwen3, in Hugging Face's own class.

SDAR is an autoregressive Qwen3 that was trained further (S. Cheng et al., 2025,
https://arxiv.org/abs/2510.06303). Its layers and weight names are Qwen3's, and a token is predicted
at its own position.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import Qwen3ForCausalLM

from dllm.models.unmasking.reference import backbone_of, load_model
from dllm.train.lm.mask_diffusion import MASK, MaskDiffusion
from dllm.train.lm.objective import common_config


class SDAR(MaskDiffusion):
    """The objective of masked blocks, on Qwen3."""

    description = "a block-diffusion language model in SDAR's format (masked blocks on Qwen3)"
    starts_from = ("SDARForCausalLM", "Qwen3ForCausalLM")
    threshold = 0.85  # of the dynamic rule in the released generate.py

    def config(self) -> dict[str, object]:
        """config.json: Qwen3's, with the block length and MASK."""
        shape = self.settings.model
        return common_config(shape, self.tokenizer) | {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "block_size": shape.canvas_length,
            "mask_token_id": MASK,
            "rope_theta": 10000.0,
            "attention_bias": False,
        }

    def build_model(self) -> Qwen3ForCausalLM:
        """A new model in fp32; all of it is trained."""
        return self.new(*backbone_of(self.config()))

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of an SDAR, or of the autoregressive Qwen3 that it begins as."""
        return load_model(path).state_dict()
