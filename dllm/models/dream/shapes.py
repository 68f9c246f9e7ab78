"""Name and shape of every tensor of a Dream, from its config.json: those of Qwen2."""

from dllm.models.fast_dllm.shapes import tensor_shapes

__all__ = ["tensor_shapes"]
