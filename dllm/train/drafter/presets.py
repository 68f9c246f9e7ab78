"""Drafter shapes for common targets, and config.json of a new drafter for any target.

Layer ids, block sizes, mask tokens and sizes are those of released drafters (z-lab's, and NVIDIA's
for Nemotron) where one is known. ``tests/train/targets`` holds the targets' own config.json, with
its source. Our choice are: every layer sees everything (some released ones slide); the mask tokens
of llama-3.1-8b and qwen3.5-27b; the layers of qwen3-30b-a3b and all of deepseek-r1-distill-qwen-7b,
by z-lab's rule of spreading layers; the block size of nemotron-3-nano-30b-a3b.
"""

from dllm.drafter.checkpoint import TargetFacts
from dllm.train.drafter.settings import CalibrateSettings, DrafterShape
from dllm.train.drafter.target import rope_of

QWEN3_MASK, QWEN3_5_MASK = 151669, 248077  # the first ids behind the tokenizers' last ones

# (layers, block, target layers, mask token, heads, key and value heads, head_dim, intermediate)
PRESETS: dict[str, DrafterShape] = {
    "qwen3-4b": DrafterShape(5, 16, (1, 9, 17, 25, 33), QWEN3_MASK, 32, 8, 128, 9728),
    "qwen3-8b": DrafterShape(5, 16, (1, 9, 17, 25, 33), QWEN3_MASK, 32, 8, 128, 12288),
    "qwen3-30b-a3b": DrafterShape(5, 16, (1, 12, 23, 34, 45), QWEN3_MASK, 32, 4, 128, 6144),
    "qwen3.5-27b": DrafterShape(5, 16, (1, 16, 31, 46, 61), QWEN3_5_MASK, 32, 8, 128, 17408),
    "qwen3.5-35b-a3b": DrafterShape(
        6, 16, (1, 6, 11, 16, 22, 27, 32, 37), QWEN3_5_MASK, 32, 8, 128, 6144
    ),
    "qwen3.5-122b-a10b": DrafterShape(
        6, 16, (1, 7, 14, 20, 26, 32, 39, 45), QWEN3_5_MASK, 32, 8, 128, 9216
    ),
    "llama-3.1-8b": DrafterShape(5, 10, (1, 8, 15, 22, 29), 128002, 32, 8, 128, 14336),
    "gpt-oss-20b": DrafterShape(8, 8, (1, 6, 11, 16, 21), 200000, 64, 8, 64, 7680),
    "nemotron-3-nano-30b-a3b": DrafterShape(6, 8, (1, 5, 19, 29, 41, 51), 990, 32, 2, 128, 6144),
    "deepseek-r1-distill-qwen-7b": DrafterShape(
        5, 16, (1, 7, 13, 19, 25), 151665, 28, 4, 128, 18944
    ),
}

# Of a target's RoPE scaling: what is about positions of images, or about rotating a part of each
# head. A drafter has neither.
OF_TARGETS_ALONE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_theta")

# For a run that starts from a trained drafter: low learning rates, so that it forgets little.
CONTINUED = CalibrateSettings(
    steps=1000, matrix_lr=0.003, vector_lr=0.0003, decay_from=0.0, anchors=16
)


def settings_for(preset: str | None, uses_suite: bool) -> CalibrateSettings:
    """Settings of a run with a preset, or with a shape that follows from the target.

    Args:
        uses_suite: the prompts are of the task suite, of each family so many.
    """
    shape = PRESETS[preset] if preset else DrafterShape()
    return CalibrateSettings(
        steps=20000,
        batch_size=4,
        anchors=256,
        matrix_lr=0.005,
        vector_lr=0.0006,
        responses=1000 if uses_suite else 50000,
        heldout=100,
        max_tokens=1024,
        drafter=shape,
    )


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
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(layers),
        },
    }
    rope = rope_of(target_config)
    config["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: rope[key] for key in rope if key not in OF_TARGETS_ALONE}
    if not facts.is_neox_style:
        config["is_neox_style"] = True
    return config
