"""Name and shape of every tensor of a Nemotron-Labs-Diffusion, from its config.json."""

from typing import Any

from dllm.models.sdar import shapes as sdar


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Llama's tensors under released names."""
    shapes = sdar.tensor_shapes({**config, "model_type": sdar.LLAMA})
    return {released_name(name): shape for name, shape in shapes.items()}


def released_name(name: str) -> str:
    """Of a tensor that transformers' Ministral 3 has under ``name``."""
    return name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head.", 1)


# The other way round: how released names begin -> how those of transformers do.
TO_TRANSFORMERS = {r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}
