"""The shape of the released model, google/diffusiongemma-26B-A4B-it: its config.json, no weights.

The numbers are those of its Gemma 4 26B-A4B backbone. `bench.roofline` counts 25.2 billion
parameters from them, 3.8 billion of them active for a token, which is what is published.
"""

import json
from pathlib import Path

from dllm.models.gemma.tiny import tiny_config, write_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "final_logit_softcapping": 30.0,
}
CANVAS_LENGTH = 256


def released_config() -> dict[str, object]:
    """config.json as nested plain data; with the smallest vision tower, which no text passes."""
    return tiny_config(canvas_length=CANVAS_LENGTH, **TEXT)


def write_without_weights(
    path: Path, config: dict[str, object], *, is_fp8: bool, image_processor: bool
) -> Path:
    """A folder that vLLM serves with ``load_format="dummy"``.

    Args:
        is_fp8: as ``dllm quantize --scheme fp8-dynamic`` would have written it.
        image_processor: whether images could be asked about; vLLM's own class insists on it.
    """
    tower: dict[str, object] = tiny_config()["vision_config"]  # type: ignore[assignment]
    if image_processor:
        tower |= {"default_output_length": 70}
    write_checkpoint(path, tiny_config(vision_config=tower), image_processor=image_processor)
    (path / "model.safetensors").unlink()
    written = config | {"vision_config": tower}
    if is_fp8:
        written["quantization_config"] = fp8_dynamic()
    (path / "config.json").write_text(json.dumps(written, indent=2))
    return path


def fp8_dynamic() -> dict[str, object]:
    """``quantization_config`` of the FP8 recipe; `dllm.quantize.compressor` needs another environment."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    from dllm.quantize.recipes import RECIPES

    recipe = RECIPES["fp8-dynamic"]
    scheme = preset_name_to_scheme(recipe.preset, ["Linear"])
    scheme.format = recipe.file_format
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=list(recipe.plan.ignore),
        quantization_status="compressed",
        format=recipe.file_format,
    )
    written: dict[str, object] = config.model_dump(mode="json")
    return written


def read_config(path: Path | None) -> dict[str, object]:
    """The config.json of a checkpoint's folder, or of the released model without one."""
    return released_config() if path is None else json.loads((path / "config.json").read_text())
