"""Glm4Moe's weights under LLaDA2's names: the other way round than ``llada2.reference``."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dllm.models.llada2.reference import FUSED, RENAMES, SEPARATE, Config


def to_released(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Glm4Moe's weights under LLaDA2's names; the inverse of ``from_released``."""
    released: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if SEPARATE[0] in name:
            parts = [tensors[name.replace(SEPARATE[0], part)] for part in SEPARATE]
            released[name.replace(SEPARATE[0], FUSED)] = torch.cat(parts)
        elif name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            down = tensors[f"{prefix}down_proj"]
            for index, (pair, out) in enumerate(zip(tensor, down, strict=True)):
                gate, up = pair.chunk(2)
                for part, value in (("gate", gate), ("up", up), ("down", out)):
                    released[f"{prefix}{index}.{part}_proj.weight"] = value
        elif not any(part in name for part in (*SEPARATE[1:], ".experts.down_proj")):
            released[_released_name(name)] = tensor
    return released


def _released_name(name: str) -> str:
    for pattern, theirs in RENAMES:
        name = name.replace(theirs, pattern.replace("\\", "").rstrip("$"))
    return name
