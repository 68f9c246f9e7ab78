"""Random LoRA adapters in PEFT's format, and the same checkpoints with them merged."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from tests.support.edited import WEIGHTS, edited

RANK, ALPHA = 4, 8
ADAPTER = "adapter_model.safetensors"


# PEFT's names for the stacked matrices of a layer's experts.
STACKED = {".experts.gate_up_proj": ".experts.base_layer", ".experts.down_proj": ".experts"}


def projections(base: Path, with_experts: bool = True) -> dict[str, torch.Size]:
    """The matrices of a checkpoint's layers that take an adapter, by name without ``.weight``."""
    return {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in load_file(base / WEIGHTS).items()
        if tensor.ndim > 1 and re.search(r"(layers|blocks)\.", name) and "vision" not in name
        if with_experts or ".experts." not in name
    }


def layer_of(name: str) -> str:
    """As an adapter names the layer of a matrix."""
    for ours, theirs in STACKED.items():
        name = re.sub(f"{re.escape(ours)}$", theirs, name)
    return f"base_model.model.{name}"


def write_adapter(
    path: Path, shapes: Mapping[str, Iterable[int]], seed: int = 0, scale: float = 0.1
) -> Path:
    """Write an adapter that changes these matrices ``[rows, columns]``, or ``[experts, ...]``."""
    path.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        *experts, rows, columns = shape
        rank = RANK * math.prod(experts)
        a = torch.randn(rank, columns, generator=random) * columns**-0.5
        tensors[f"{layer_of(name)}.lora_A.weight"] = a
        tensors[f"{layer_of(name)}.lora_B.weight"] = scale * torch.randn(
            rows, rank, generator=random
        )
    save_file(tensors, path / ADAPTER)
    targets = sorted({name.rsplit(".", 1)[-1] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(base: Path, adapter: Path, out: Path) -> Path:
    """Write the checkpoint whose weights are W + alpha / r * B @ A."""
    parts = load_file(adapter / ADAPTER)

    def add(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            layer = layer_of(name.removesuffix(".weight"))
            if f"{layer}.lora_A.weight" in parts:
                a, b = (parts[f"{layer}.lora_{part}.weight"] for part in "AB")
                if weights[name].ndim == 3:  # as PEFT's ``ParamWrapper`` merges
                    a = a.reshape(len(weights[name]), RANK, -1)
                    b = b.reshape(len(b), RANK, -1).permute(2, 0, 1)
                weights[name] = weights[name] + ALPHA / RANK * b @ a

    return edited(base, out, add)


@contextmanager
def changed(model: Any, adapter: Path, rows: Tensor) -> Iterator[None]:
    """Add the adapter's change to the output of transformers' layers, in these rows ``[L]``."""
    parts, hooks = load_file(adapter / ADAPTER), []
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, down in parts.items():
        if "lora_A" not in name:
            continue
        matrices = down.float(), parts[name.replace("lora_A", "lora_B")].float()
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

        def add(_: Any, given: Any, output: Tensor, pair: Any = matrices) -> Tensor:
            return output + rows[:, None] * (scale * given[0] @ pair[0].T @ pair[1].T)

        of_model = model.get_submodule(layer.replace("encoder.", "model.", 1))
        hooks.append(of_model.register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rows_changed(count: int, first: int) -> Tensor:
    """``[count]`` bool: those from ``first`` on."""
    return torch.arange(count) >= first


def asked(adapter: Path, number: int) -> LoRARequest:
    """The request of an adapter; each adapter has a number of its own."""
    return LoRARequest(adapter.name, number, str(adapter))
