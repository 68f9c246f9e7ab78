"""Name and shape of every tensor of SDAR and its relatives, from their config.json.

The names are those of the backbone in transformers, with three matrices for each expert, as the
released checkpoints have them.
"""

from typing import Any

# Values of model_type; others are Qwen3.
LLAMA, QWEN2 = "llama", ("a2d-qwen2", "Fast_dLLM_Qwen", "Dream")


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """With ``tie_word_embeddings`` there is no ``lm_head``."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    has_norms = config["model_type"] not in (LLAMA, *QWEN2)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (heads * head, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{layer}self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * head),
        }
        if has_norms:
            shapes |= {f"{layer}self_attn.{part}_norm.weight": (head,) for part in "qk"}
        if config["model_type"] in QWEN2:
            shapes[f"{layer}self_attn.q_proj.bias"] = (heads * head,)
            shapes |= {f"{layer}self_attn.{part}_proj.bias": (kv_heads * head,) for part in "kv"}
        if "num_experts" in config:
            shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                inner = config["moe_intermediate_size"]
                shapes |= gated_mlp(f"{layer}mlp.experts.{expert}.", hidden, inner)
        else:
            shapes |= gated_mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
    return shapes


def gated_mlp(
    prefix: str, hidden: int, inner: int, leaf: str = "weight"
) -> dict[str, tuple[int, ...]]:
    """Shapes ``[out, in]`` of an MLP's three matrices, by name."""
    return {
        f"{prefix}gate_proj.{leaf}": (inner, hidden),
        f"{prefix}up_proj.{leaf}": (inner, hidden),
        f"{prefix}down_proj.{leaf}": (hidden, inner),
    }
