"""config.json of LLaDA-8B, whose names are OLMo's, under those of Llama, and of Dream: Qwen2's.

Sources: the config.json of GSAI-ML/LLaDA-8B-Instruct and Dream-org/Dream-v0-Instruct-7B. The
released checkpoints bring classes like these as remote code, which is not needed here.
"""

from typing import Any

from transformers import LlamaConfig, Qwen2Config

from dllm.models import is_ours
from dllm.settings.denoising import WHOLE_SEQUENCE

# OLMo's names -> Llama's.
NAMES = {
    "d_model": "hidden_size",
    "mlp_hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}


class WholeSequence:
    """``gen_length``: the most masks that stand behind a text, and an answer's usual length."""

    architectures: list[str] | None
    gen_length: int

    @property
    def block_size(self) -> int:
        return WHOLE_SEQUENCE

    @block_size.setter
    def block_size(self, value: int) -> None:
        """What config.json may call so is nothing that a token sees."""

    @property
    def canvas_length(self) -> int | None:
        """vLLM recognizes a diffusion model by this name."""
        return self.gen_length if is_ours(self.architectures) else None


class LLaDAConfig(WholeSequence, LlamaConfig):
    model_type = "llada"
    mask_token_id: int = 126336  # <|mdm_mask|>
    gen_length: int = 128

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{NAMES.get(name, name): value for name, value in fields.items()})


class DreamConfig(WholeSequence, Qwen2Config):
    model_type = "Dream"
    mask_token_id: int = 151666  # <|mask|>
    gen_length: int = 256
