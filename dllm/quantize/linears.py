"""The linear layers of the text model: where a checkpoint keeps them before and after quantizing.

Before, the experts of a layer are two stacks of matrices (``experts.gate_up_proj``,
``experts.down_proj``); after, each expert has three layers of its own, as vLLM and LLM Compressor
expect of a quantized mixture (``experts.3.gate_proj.weight``). What vLLM fuses into one layer (q, k
and v; gate and up) has to share an NVFP4 global scale.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dllm.models.gemma.shapes import Config, tensor_shapes
from dllm.models.gemma.weights import DECODER
from quant.schemes import shared_name

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class Linear:
    """One linear layer.

    Attributes:
        module: its name in a quantized checkpoint.
        shape: (out, in) of its weight.
        source: the tensor that holds its weight in an unquantized checkpoint.
        expert: its index in that tensor, if it is a stack of experts.
        first_row: where its rows begin there.
    """

    module: str
    shape: tuple[int, int]
    source: str
    expert: int | None = None
    first_row: int = 0

    @property
    def fused(self) -> str:
        """The layer that vLLM makes of it, alone or with others."""
        parent, _, leaf = self.module.rpartition(".")
        return f"{parent}.{_FUSED.get(leaf, leaf)}"


def text_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the text model cannot do without.

    Not the layer scalars: a half without one has 1.
    """
    shapes = tensor_shapes({**config, "vision_config": None})
    return {name: shape for name, shape in shapes.items() if not name.endswith(".layer_scalar")}


def linears(config: Config) -> list[Linear]:
    """Every linear layer but the head, in the order of the checkpoint's layers."""
    found: list[Linear] = []
    for name, shape in text_shapes(config).items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "weight" and parent.endswith("proj"):
            found.append(Linear(parent, (shape[0], shape[1]), name))
        elif name.endswith("experts.gate_up_proj"):
            inner = shape[1] // 2
            for expert in range(shape[0]):
                for number, part in enumerate(("gate_proj", "up_proj")):
                    found.append(
                        Linear(
                            f"{parent}.{expert}.{part}",
                            (inner, shape[2]),
                            name,
                            expert,
                            number * inner,
                        )
                    )
        elif name.endswith("experts.down_proj"):
            for expert in range(shape[0]):
                module = f"{parent}.{expert}.down_proj"
                found.append(Linear(module, (shape[1], shape[2]), name, expert))
    return found


def layer_number(name: str) -> int | None:
    """The decoder layer that a tensor or module belongs to; None for the rest of the model."""
    match = re.match(r"layers\.(\d+)\.", shared_name(name))
    return int(match[1]) if match else None


def one_name(name: str) -> str:
    """The name under which every copy of a shared weight goes: the decoder's.

    Vision towers and layer scalars are not shared: their names stay.
    """
    shared = shared_name(name)
    if shared == name or shared.startswith("encoder.") or shared.endswith(".layer_scalar"):
        return name
    return DECODER + shared


def by_one_name(names: Iterable[str]) -> dict[str, list[str]]:
    """One name -> the names of its copies, the decoder's first."""
    copies: dict[str, list[str]] = {}
    for name in sorted(names):  # "model.decoder" sorts before "model.encoder"
        copies.setdefault(one_name(name), []).append(name)
    return copies
