"""Name and shape of every tensor of a DiffusionGemma checkpoint, from its config.json.

The names are those that ``save_pretrained`` of transformers 5.19 writes. The weights that encoder
and decoder share are stored once, under ``model.decoder``. Under ``model.encoder`` are only the
encoder's own ``layer_scalar`` of every layer, and the vision tower.
"""

from dllm.models.gemma.weights import DECODER, ENCODER
from dllm.models.sdar.shapes import gated_mlp

Config = dict[str, object]


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Tensors of experts and of the vision tower are there only if the config describes these."""
    text: dict = config["text_config"]  # type: ignore[assignment]
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{DECODER}embed_tokens.weight": (text["vocab_size"], hidden),
        f"{DECODER}norm.weight": (hidden,),
        f"{DECODER}self_conditioning.pre_norm.weight": (hidden,),
    }
    shapes |= gated_mlp(f"{DECODER}self_conditioning.", hidden, inner)
    for index, layer_type in enumerate(text["layer_types"]):
        layer = f"{DECODER}layers.{index}."
        shapes |= _attention(f"{layer}self_attn.", text, is_full=layer_type == "full_attention")
        shapes |= gated_mlp(f"{layer}mlp.", hidden, inner)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (hidden,)
        if text["num_experts"] is not None:
            shapes |= _experts(layer, text)
        shapes[f"{layer}layer_scalar"] = (1,)
        shapes[f"{ENCODER}layers.{index}.layer_scalar"] = (1,)
    if config["vision_config"] is not None:
        shapes |= _vision_tower(config["vision_config"], hidden)  # type: ignore[arg-type]
    return shapes


def _attention(prefix: str, text: dict, *, is_full: bool) -> dict:
    hidden, num_heads = text["hidden_size"], text["num_attention_heads"]
    head = text["global_head_dim"] if is_full else text["head_dim"]
    num_kv = text["num_global_key_value_heads"] if is_full else text["num_key_value_heads"]
    shapes = {
        f"{prefix}q_proj.weight": (num_heads * head, hidden),
        f"{prefix}k_proj.weight": (num_kv * head, hidden),
        f"{prefix}o_proj.weight": (hidden, num_heads * head),
        f"{prefix}q_norm.weight": (head,),
        f"{prefix}k_norm.weight": (head,),
    }
    if not is_full:  # in full-attention layers the keys are also the values
        shapes[f"{prefix}v_proj.weight"] = (num_kv * head, hidden)
    return shapes


def _experts(layer: str, text: dict) -> dict:
    hidden, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    return {
        f"{layer}router.proj.weight": (count, hidden),
        f"{layer}router.scale": (hidden,),
        f"{layer}router.per_expert_scale": (count,),
        f"{layer}experts.gate_up_proj": (count, 2 * inner, hidden),
        f"{layer}experts.down_proj": (count, hidden, inner),
        f"{layer}post_feedforward_layernorm_1.weight": (hidden,),
        f"{layer}post_feedforward_layernorm_2.weight": (hidden,),
        f"{layer}pre_feedforward_layernorm_2.weight": (hidden,),
    }


def _vision_tower(vision: dict, text_hidden: int) -> dict:
    hidden, head = vision["hidden_size"], vision["head_dim"]
    width = vision["num_attention_heads"] * head
    tower = "model.encoder.vision_tower."
    shapes = {
        "model.encoder.embed_vision.embedding_projection.weight": (text_hidden, hidden),
        f"{tower}patch_embedder.input_proj.weight": (hidden, 3 * vision["patch_size"] ** 2),
        f"{tower}patch_embedder.position_embedding_table": (
            2,
            vision["position_embedding_size"],
            hidden,
        ),
    }
    for index in range(vision["num_hidden_layers"]):
        layer = f"{tower}encoder.layers.{index}."
        shapes |= gated_mlp(f"{layer}mlp.", hidden, vision["intermediate_size"], "linear.weight")
        for name in ("q", "k", "v"):
            shapes[f"{layer}self_attn.{name}_proj.linear.weight"] = (width, hidden)
        shapes[f"{layer}self_attn.o_proj.linear.weight"] = (hidden, width)
        shapes[f"{layer}self_attn.q_norm.weight"] = (head,)
        shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (hidden,)
    return shapes
