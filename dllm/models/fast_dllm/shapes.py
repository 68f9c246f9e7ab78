"""Name and shape of every tensor of a Fast-dLLM v2, from its config.json: those of Qwen2."""

from typing import Any

from dllm.models.sdar import shapes as sdar


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """With ``tie_word_embeddings`` there is no ``lm_head``."""
    return sdar.tensor_shapes({**config, "model_type": sdar.QWEN2})
