"""config.json of Dream-7B and DiffuCoder: that of Qwen2, and a mask.

Source: the config.json of Dream-org/Dream-v0-Instruct-7B. The released checkpoints bring a class
like this as remote code, which is not needed here.
"""

from transformers import Qwen2Config

from dllm.models.llada.config import WholeSequence


class DreamConfig(WholeSequence, Qwen2Config):
    model_type = "Dream"
    mask_token_id: int = 151666  # <|mask|>
    gen_length: int = 256
