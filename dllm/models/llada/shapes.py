"""Name and shape of every tensor of a LLaDA-8B or a Dream, from its config.json."""

from typing import Any

from dllm.models.llada.config import NAMES
from dllm.models.sdar import shapes as sdar

# Released names -> Llama's: how they begin, and what is in them.
OF_MODEL = {
    "model.transformer.wte.": "model.embed_tokens.",
    "model.transformer.ln_f.": "model.norm.",
    "model.transformer.ff_out.": "lm_head.",
}
IN_BLOCK = {
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".q_proj.": ".self_attn.q_proj.",
    ".k_proj.": ".self_attn.k_proj.",
    ".v_proj.": ".self_attn.v_proj.",
    ".attn_out.": ".self_attn.o_proj.",
    ".ff_proj.": ".mlp.gate_proj.",
    ".up_proj.": ".mlp.up_proj.",
    ".ff_out.": ".mlp.down_proj.",
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """With ``weight_tying`` there is no ``ff_out`` of the model."""
    if config["model_type"] in sdar.QWEN2:
        return sdar.tensor_shapes(config)
    fields = {NAMES.get(name, name): value for name, value in config.items()}
    fields |= {"model_type": sdar.LLAMA}
    fields["num_key_value_heads"] = (
        fields.get("num_key_value_heads") or fields["num_attention_heads"]
    )
    return {released_name(name): shape for name, shape in sdar.tensor_shapes(fields).items()}


def released_name(name: str) -> str:
    """Of a tensor that Llama has under ``name``."""
    for released, ours in OF_MODEL.items():
        if name.startswith(ours):
            return name.replace(ours, released, 1)
    for released, ours in IN_BLOCK.items():
        name = name.replace(ours, released, 1)
    return name.replace("model.layers.", "model.transformer.blocks.", 1)
