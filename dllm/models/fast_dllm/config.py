"""config.json of Fast-dLLM v2: that of Qwen2, and ``bd_size``, which others call ``block_size``.

The released checkpoints bring a class like this as remote code, which is not needed here. That code
has the mask's id as a default of its functions; config.json does not say it.
"""

from typing import ClassVar

from transformers import Qwen2Config

from dllm.models.unmasking.config import Blocks


class FastDLLMConfig(Blocks, Qwen2Config):
    """Qwen2's, with blocks."""

    model_type = "Fast_dLLM_Qwen"
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "bd_size"}

    bd_size: int = 32
    mask_token_id: int = 151665  # |<MASK>|, behind the last token of Qwen2.5's own tokenizers
