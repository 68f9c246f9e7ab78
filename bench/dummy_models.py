"""Folders of models without weights, which vLLM serves with ``--load-format dummy``.

Dummy weights choose experts about evenly and never converge: they are for speed alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from dllm.models.gemma.tiny import write_checkpoint


def write_without_weights(path: Path, config: dict[str, object], *, is_fp8: bool) -> Path:
    """A folder that vLLM serves with ``--load-format dummy``.

    Args:
        is_fp8: as ``dllm quantize --scheme fp8-dynamic`` would have written it.
    """
    write_checkpoint(path)  # a tiny one, for its tokenizer and generation config
    (path / "model.safetensors").unlink()
    quantization = {"quantization_config": fp8_dynamic()} if is_fp8 else {}
    (path / "config.json").write_text(json.dumps(config | quantization, indent=2))
    return path


def fp8_dynamic() -> dict[str, object]:
    """``quantization_config`` of the FP8 recipe, without LLM Compressor."""
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
