"""config.json of SDAR, SDAR-MoE and TraDo: that of Qwen3 or Qwen3-MoE, and a block size.

The released checkpoints bring classes like these as remote code, which is not needed here.
"""

from transformers import Qwen3Config, Qwen3MoeConfig

MASK_TOKEN_ID = 151669  # <|MASK|> of the released tokenizers


class _Blocks:
    """Fields beside Qwen3's.

    ``canvas_length`` is the name by which vLLM recognizes a diffusion model.
    """

    block_size: int | None = None
    mask_token_id: int = MASK_TOKEN_ID

    @property
    def canvas_length(self) -> int | None:
        """A canvas is the rest of a block."""
        return self.block_size


class SDARConfig(_Blocks, Qwen3Config):
    """config.json of a dense SDAR."""

    model_type = "sdar"


class SDARMoeConfig(_Blocks, Qwen3MoeConfig):
    """config.json of an SDAR with experts."""

    model_type = "sdar_moe"
