"""Name and shape of every tensor of a LLaDA2 checkpoint, from its config.json and its defaults."""

from typing import Any

from dllm.models.sdar.shapes import gated_mlp

MASK_TOKEN_ID = 156895  # <|mask|> of the released tokenizers
BLOCK_SIZE = 32  # of all released LLaDA2.0 and 2.1; their config.json does not say it

# Fields that a config.json may leave out, with the values of the released models.
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


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Released names; with ``tie_word_embeddings`` there is no ``lm_head``."""
    config = {**DEFAULTS, **config}
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        shapes |= {
            f"{layer}attention.query_key_value.weight": ((heads + 2 * kv_heads) * head, hidden),
            f"{layer}attention.dense.weight": (hidden, heads * head),
            f"{layer}attention.query_layernorm.weight": (head,),
            f"{layer}attention.key_layernorm.weight": (head,),
        }
        if index < config["first_k_dense_replace"]:
            shapes |= gated_mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
            continue
        shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes[f"{layer}mlp.gate.expert_bias"] = (config["num_experts"],)
        shared = inner * config["num_shared_experts"]
        shapes |= gated_mlp(f"{layer}mlp.shared_experts.", hidden, shared)
        for expert in range(config["num_experts"]):
            shapes |= gated_mlp(f"{layer}mlp.experts.{expert}.", hidden, inner)
    return shapes
