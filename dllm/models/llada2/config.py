"""config.json of LLaDA2.0 and LLaDA2.1, with the fields that vLLM's class of the backbone reads.

The released checkpoints bring a class like this as remote code, which is not needed here.
"""

from typing import Any

from transformers import PreTrainedConfig

from dllm.models.llada2.shapes import DEFAULTS
from dllm.models.unmasking.config import Blocks


class LLaDA2MoeConfig(Blocks, PreTrainedConfig):
    """What config.json leaves out has the value of the released models."""

    model_type = "llada2_moe"
    # The base class asks for it while it reads `rope_scaling`, before it sets the fields.
    max_position_embeddings = 32768

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**DEFAULTS, **kwargs})
