"""SDAR in Hugging Face's own Qwen3 or Qwen3-MoE, whose layers and weight names it has."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def qwen3_config(config: Mapping[str, object]) -> Qwen3Config | Qwen3MoeConfig:
    """The config of a Qwen3 or, if there are experts, of a Qwen3-MoE.

    Args:
        config: a config.json of SDAR, SDAR-MoE or TraDo.
    """
    kind = Qwen3MoeConfig if "num_experts" in config else Qwen3Config
    return kind(**{**config, "model_type": kind.model_type})


def load_reference(path: Path) -> PreTrainedModel:
    """The model of a checkpoint directory, in fp32 with eager attention."""
    config = qwen3_config(json.loads((path / "config.json").read_text()))
    kind = Qwen3MoeForCausalLM if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM
    model = kind.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
