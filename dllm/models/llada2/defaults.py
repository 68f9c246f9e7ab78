"""Fields that a config.json of LLaDA2 may leave out, with the values of the released models."""

from typing import Any

MASK_TOKEN_ID = 156895  # <|mask|> of the released tokenizers
BLOCK_SIZE = 32  # of all released LLaDA2.0 and 2.1; their config.json does not say it

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
