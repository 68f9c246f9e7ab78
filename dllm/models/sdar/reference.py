"""SDAR and its relatives in Hugging Face's own classes, whose layers and weight names they have."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

# By model_type. All others are a Qwen3 or, if there are experts, a Qwen3-MoE.
BACKBONES: Mapping[object, type[PreTrainedModel]] = {
    "a2d-qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
}


def backbone_of(config: Mapping[str, object]) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of the backbone in transformers, and its config.

    Args:
        config: a config.json of one of these models.
    """
    qwen3 = Qwen3MoeForCausalLM if "num_experts" in config else Qwen3ForCausalLM
    kind = BACKBONES.get(config["model_type"], qwen3)
    own = kind.config_class
    return kind, own(**{**config, "model_type": own.model_type})


def load_reference(path: Path) -> PreTrainedModel:
    """The model of a checkpoint directory, in fp32 with eager attention."""
    kind, config = backbone_of(json.loads((path / "config.json").read_text()))
    model = kind.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
