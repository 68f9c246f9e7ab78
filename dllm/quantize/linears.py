"""The linear layers of the text model: their names and places in a checkpoint.

In an unquantized DiffusionGemma the experts of a layer are two tensors, ``experts.gate_up_proj``
and ``experts.down_proj``, with a matrix for each expert. In a quantized one, and always in SDAR-MoE
and LLaDA2, every expert has three layers of its own (``experts.3.gate_proj.weight``), as vLLM and
LLM Compressor expect. vLLM fuses some layers into one (q, k and v; gate and up); these have to
share an NVFP4 global scale. In LLaDA2 q, k and v are one layer in the checkpoint, too.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dllm.models import FAMILIES
from dllm.models.gemma.shapes import Config
from dllm.models.gemma.weights import DECODER
from dllm.quant.schemes import LINEAR_ENDINGS, shared_name
from dllm.quantize.checkpoint import DIFFUSION_GEMMA, Checkpoint, few
from dllm.settings.command import CommandError

# How names of linear layers end: all but the head and the routers of SDAR-MoE and LLaDA2.
LINEARS = (*LINEAR_ENDINGS, ".router.proj")
HEAD_OF_LLADA = "model.transformer.ff_out"  # a layer of each block is called so, too
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "ff_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class Linear:
    module: str  # its name in a quantized checkpoint
    shape: tuple[int, int]
    source: str  # the tensor that holds its weight in an unquantized checkpoint
    expert: int | None = None  # the index of its matrix in that tensor
    first_row: int = 0  # in that matrix (gate and up are one above the other)

    @property
    def fused(self) -> str:
        """The name of the layer in vLLM, which may be fused of several: theirs is then the same."""
        parent, _, leaf = self.module.rpartition(".")
        return f"{parent}.{_FUSED.get(leaf, leaf)}"


def text_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Layer scalars are not among them: they may be missing, and count as 1 then."""
    family = FAMILIES[config["architectures"][0]]  # type: ignore[index]
    shapes = family.tensor_shapes({**config, "vision_config": None})
    return {name: shape for name, shape in shapes.items() if not name.endswith(".layer_scalar")}


def linears(config: Config) -> list[Linear]:
    """Every linear layer except the head, layer by layer."""
    found: list[Linear] = []
    for name, shape in text_shapes(config).items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "weight" and parent.endswith(LINEARS) and parent != HEAD_OF_LLADA:
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


def one_name(name: str) -> str:
    """The decoder's name of a weight that DiffusionGemma's halves share, whichever name is given.

    Weights of vision and layer scalars are not shared: their names are returned unchanged.
    """
    shared = shared_name(name)
    if shared == name or shared.startswith("encoder.") or shared.endswith(".layer_scalar"):
        return name
    return DECODER + shared


def by_one_name(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """All copies' names, by their ``one_name``; the decoder's first. Other families have one."""
    if DIFFUSION_GEMMA not in checkpoint.config["architectures"]:  # type: ignore[operator]
        return {name: [name] for name in checkpoint.tensors}
    copies: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors):  # "model.decoder" sorts before "model.encoder"
        copies.setdefault(one_name(name), []).append(name)
    return copies


def together(layers: Iterable[Linear]) -> list[list[Linear]]:
    """The layers in lists; each list holds those that vLLM fuses into one."""
    sets: dict[str, list[Linear]] = defaultdict(list)
    for layer in layers:
        sets[layer.fused].append(layer)
    return list(sets.values())


def part_of(stored: torch.Tensor, layer: Linear) -> torch.Tensor:
    """The weight of a layer, ``[out, in]``, in the tensor that holds it."""
    if layer.expert is None:
        return stored
    return stored[layer.expert, layer.first_row : layer.first_row + layer.shape[0]]


def refuse_unfit(source: Checkpoint) -> None:
    """Raises CommandError if it is quantized, or tensors are missing, of wrong shape or dtype."""
    if "quantization_config" in source.config:
        raise CommandError(
            f"{source.path} is quantized already (its config.json has a quantization_config). Give "
            "the checkpoint that it was made from."
        )
    copies = by_one_name(source)
    expected = text_shapes(source.config)
    missing = [name for name in expected if name not in copies]
    if missing:
        raise CommandError(
            f"{source.path} misses {few(missing)}. Download or save it again: it is not whole."
        )
    for name, stored in copies.items():
        for copy in stored:
            tensor = source.tensors[copy]
            if name in expected and tensor.shape != expected[name]:
                raise CommandError(
                    f"{source.path}: {copy} has shape {list(tensor.shape)}; config.json makes it "
                    f"{list(expected[name])}."
                )
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                raise CommandError(
                    f"{source.path}: {copy} is {tensor.dtype}; to quantize, weights have to be "
                    "bfloat16, float16 or float32."
                )
