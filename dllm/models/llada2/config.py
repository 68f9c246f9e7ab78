"""config.json of LLaDA2.0 and LLaDA2.1, with the fields that vLLM's class of the backbone reads.

The released checkpoints bring a class like this as remote code, which is not needed here.
"""

from typing import Any

from transformers import PreTrainedConfig

MASK_TOKEN_ID = 156895  # <|mask|> of the released tokenizers
BLOCK_SIZE = 32  # of all released LLaDA2.0 and 2.1; their config.json does not say it

# Fields of the backbone that a released config.json may leave out.
DEFAULTS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "mask_token_id": MASK_TOKEN_ID,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
}


class LLaDA2MoeConfig(PreTrainedConfig):
    """config.json of LLaDA2; what it leaves out has the value of the released models."""

    model_type = "llada2_moe"
    # The base class asks for it while it reads `rope_scaling`, before it sets the fields.
    max_position_embeddings = 32768

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**DEFAULTS, **kwargs})

    @property
    def canvas_length(self) -> int | None:
        """A canvas is the rest of a block; vLLM recognizes a diffusion model by this name."""
        return self.block_size
