"""Name and shape of every tensor of a LLaDA2 checkpoint, from its config.json."""

from typing import Any

from dllm.models.llada2.defaults import DEFAULTS
from dllm.models.sdar.shapes import gated_mlp


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, under the released names.

    config: the contents of config.json. With ``tie_word_embeddings`` there is no ``lm_head``.
    """
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
