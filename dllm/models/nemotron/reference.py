"""Nemotron-Labs-Diffusion in Hugging Face's own Ministral 3, which has other names of weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Ministral3Config, Ministral3ForCausalLM

from dllm.models.nemotron.shapes import released_name


def load_reference(path: Path) -> Ministral3ForCausalLM:
    """The model of a checkpoint directory, in fp32 with eager attention.

    Raises:
        KeyError: a weight is missing.
        RuntimeError: a weight has another shape.
    """
    fields = json.loads((path / "config.json").read_text())
    model = Ministral3ForCausalLM(Ministral3Config(**{**fields, "model_type": "ministral3"}))
    model.set_attn_implementation("eager")
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict({name: tensors[released_name(name)] for name in model.state_dict()})
    return model.to(torch.float32).eval()
