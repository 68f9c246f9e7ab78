"""LoRA: a low-rank change of a model's matrices (E. Hu et al., 2021, https://arxiv.org/abs/2106.09685).

A matrix W of a layer becomes W + B @ A. Only A and B are trained, and only they are written, in the
format of Hugging Face's PEFT.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dllm.train.run_files import write_json, write_weights

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = "adapter_model.safetensors"
PART = ".parametrizations.weight.0"


class LowRank(nn.Module):
    """Adds B @ A, which begins as zero, to a matrix ``[rows, columns]``."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The changed matrix."""
        return weight + self.b @ self.a


def add_adapter(model: nn.Module, rank: int) -> None:
    """Give every projection of the layers an adapter; nothing else is trained any more."""
    model.requires_grad_(False)
    changes: dict[int, LowRank] = {}
    for name, layer in list(model.named_modules()):
        is_layer = ".layers." in name and "vision" not in name
        if isinstance(layer, nn.Linear) and is_layer and name.endswith(PROJECTIONS):
            if id(layer.weight) not in changes:  # DiffusionGemma's halves share their weights
                changes[id(layer.weight)] = LowRank(layer.out_features, layer.in_features, rank)
            parametrize.register_parametrization(layer, "weight", changes[id(layer.weight)])


def write_adapter(model: nn.Module, rank: int, path: Path) -> None:
    """Write what ``add_adapter`` added as a PEFT adapter, in bf16."""
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LowRank):
            layer_name = f"base_model.model.{name.removesuffix(PART)}"
            tensors[f"{layer_name}.lora_A.weight"] = layer.a.detach()
            tensors[f"{layer_name}.lora_B.weight"] = layer.b.detach()
    write_weights(path / ADAPTER, tensors)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    sizes = {"r": rank, "lora_alpha": rank, "target_modules": PROJECTIONS}
    write_json(path / "adapter_config.json", config | sizes)
