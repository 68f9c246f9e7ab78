"""config.json of a new drafter, for any target: sizes of the settings, or else the target's."""

from dllm.drafter.checkpoint import TargetFacts
from dllm.train.settings import DrafterShape
from dllm.train.target import rope_of

# Of a target's RoPE scaling: what is about positions of images, or about rotating a part of each
# head. A drafter has neither.
OF_TARGETS_ALONE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_theta")


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers spread evenly from the second to the third-last: z-lab's rule.

    A target with fewer than ``count`` + 4 layers gives its last ones.
    """
    if num_target_layers < count + 4:
        return tuple(range(max(0, num_target_layers - count), num_target_layers))
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def drafter_config(
    shape: DrafterShape, target_config: dict[str, object], facts: TargetFacts
) -> dict[str, object]:
    """config.json of a new drafter in z-lab's format."""
    given = target_config.get
    num_heads = shape.num_heads or given("num_attention_heads")
    layers = shape.target_layer_ids or spread_layers(facts.num_layers, shape.num_layers)
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": shape.intermediate_size or given("intermediate_size"),
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": shape.num_kv_heads or given("num_key_value_heads") or num_heads,
        "head_dim": shape.head_dim or given("head_dim") or facts.hidden_size // int(str(num_heads)),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": given("max_position_embeddings"),
        "tie_word_embeddings": False,
        "draft_vocab_size": min(shape.draft_vocab_size or facts.vocab_size, facts.vocab_size),
        "block_size": shape.block_size,
        "num_target_layers": facts.num_layers,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(layers)},
    }
    rope = rope_of(target_config)
    config["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: rope[key] for key in rope if key not in OF_TARGETS_ALONE}
    if not facts.is_neox_style:
        config["is_neox_style"] = True
    return config
