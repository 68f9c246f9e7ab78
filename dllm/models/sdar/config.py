"""config.json of these models: their backbone's, and what a block is.

The released checkpoints bring classes like these as remote code, which is not needed here. What
their config.json leave out has the value that all of them were trained with.
"""

from typing import ClassVar

from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from dllm.models.unmasking.config import Blocks

MASK_TOKEN_ID = 151669  # behind the last token of Qwen3's own tokenizers


class _Blocks(Blocks):
    mask_token_id: int = MASK_TOKEN_ID


class SDARConfig(_Blocks, Qwen3Config):
    model_type = "sdar"


class SDARMoeConfig(_Blocks, Qwen3MoeConfig):
    model_type = "sdar_moe"


class A2DQwen3Config(_Blocks, Qwen3Config):
    """Tiny-A2D 0.6B's; that of its siblings without blocks ("mdlm") is the same."""

    model_type = "a2d-qwen3"
    block_size = 32


class A2DQwen2Config(_Blocks, Qwen2Config):
    """Tiny-A2D 0.5B's; that of its siblings without blocks ("mdlm") is the same."""

    model_type = "a2d-qwen2"
    block_size = 32
    mask_token_id = 151665  # behind the last token of Qwen2.5's own tokenizers


class StableDiffcoderConfig(_Blocks, LlamaConfig):
    """Its ``model_type`` is Llama's."""

    model_type = "llama"
    block_size = 4
    mask_token_id = 5  # <[MASK_TOKEN]>


class FastDLLMConfig(Blocks, Qwen2Config):
    """The released remote code has the mask's id as a default of its functions."""

    model_type = "Fast_dLLM_Qwen"
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "bd_size"}

    bd_size: int = 32
    mask_token_id: int = 151665  # |<MASK>|, behind the last token of Qwen2.5's own tokenizers
