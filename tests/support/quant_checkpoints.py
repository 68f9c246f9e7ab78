"""Quantized checkpoints written by hand, in the layouts that ours and other tools write.

    write_quantized(bf16_directory, target, "nvfp4", layout=OURS)

It uses nothing of ``quant`` or of compressed-tensors: codes and scales come from ``naive_formats``,
and names and config are written out. ``dequantized`` reads such a checkpoint.
"""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support import naive_formats as naive

Tensors = dict[str, torch.Tensor]
DECODER = "model.decoder."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATTERNS = (
    "lm_head",
    "re:.*embed_tokens$",
    "re:.*router.*",
    "re:.*self_conditioning.*",
    "re:.*vision_tower.*",
    "re:.*embed_vision.*",
)
# Static scales of NVFP4 inputs: what calibration would find for inputs of at most this magnitude.
LARGEST_INPUT = 8.0


@dataclass(frozen=True)
class Layout:
    """Under which names a checkpoint keeps its weights, and how it lists layers not quantized."""

    prefix: str
    expands_ignore: bool


OURS = Layout(DECODER, expands_ignore=False)
# One copy, without the prefixes of encoder and decoder; every module is listed by name.
REDHAT = Layout("model.", expands_ignore=True)
ENCODER_ONLY = Layout("model.encoder.language_model.", expands_ignore=True)


def numbers(kind: str, bits: int, strategy: str, dynamic: object, group: int | None = None) -> dict:
    """Weights or inputs of a config group, as compressed-tensors writes them into config.json."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": group,
        "strategy": strategy,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic is True else "minmax",
        "observer_kwargs": {},
    }


SIDES = {
    "fp8-dynamic": (numbers("float", 8, "channel", False), numbers("float", 8, "token", True)),
    "int8-dynamic": (numbers("int", 8, "channel", False), numbers("int", 8, "token", True)),
    "nvfp4": (
        numbers("float", 4, "tensor_group", False, 16),
        numbers("float", 4, "tensor_group", "local", 16),
    ),
    "nvfp4a16": (numbers("float", 4, "tensor_group", False, 16), None),
}
FORMATS = {
    "fp8-dynamic": "float-quantized",
    "int8-dynamic": "int-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "nvfp4a16": "nvfp4-pack-quantized",
}


def quantize(weight: torch.Tensor, scheme: str, divisor: float) -> Tensors:
    """The tensors of one linear layer, [out, in], by the last part of their names."""
    values = weight.double().numpy()
    if not scheme.startswith("nvfp4"):
        table, largest = (naive.FP8, 448.0) if scheme == "fp8-dynamic" else (naive.INT8, 127.0)
        scale = np.float32(np.abs(values).max(1, keepdims=True) / largest)
        codes = naive.nearest(values / scale, table)
        if scheme == "fp8-dynamic":
            bytes_ = (codes | np.where(values < 0, 128, 0)).astype(np.uint8)
            stored = torch.from_numpy(bytes_).view(torch.float8_e4m3fn)
        else:
            stored = torch.from_numpy((np.sign(values) * codes).astype(np.int8))
        return {"weight": stored, "weight_scale": torch.from_numpy(scale)}
    scales = naive.nvfp4_scales(values, divisor)
    step = np.repeat(scales / divisor, 16, axis=1)
    codes = naive.nearest(values / step, naive.FP4) | np.where(values < 0, 8, 0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    parts = {
        "weight_packed": torch.from_numpy(packed),
        "weight_scale": torch.from_numpy(naive.nearest(scales, naive.FP8).astype(np.uint8)).view(
            torch.float8_e4m3fn
        ),
        "weight_global_scale": torch.tensor([divisor], dtype=torch.float32),
    }
    if scheme == "nvfp4":
        parts["input_global_scale"] = torch.tensor([448.0 * 6.0 / LARGEST_INPUT])
    return parts


def dequantize(parts: Tensors) -> torch.Tensor:
    """The weight that the tensors of one linear layer stand for: [out, in] fp32."""
    if "weight_packed" not in parts:
        return (parts["weight"].float().double() * parts["weight_scale"].double()).float()
    packed = parts["weight_packed"].numpy()
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    values = naive.FP4[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    step = parts["weight_scale"].float().double() / parts["weight_global_scale"].double()
    return (torch.from_numpy(values) * step.repeat_interleave(16, dim=1)).float()


def split_experts(tensors: Tensors) -> Tensors:
    """Fused experts ``[E, rows, columns]`` as linear layers of each expert."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                stem = name.removesuffix("gate_up_proj") + f"{expert}."
                split[f"{stem}gate_proj.weight"], split[f"{stem}up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                split[name.removesuffix("down_proj") + f"{expert}.down_proj.weight"] = down
        else:
            split[name] = tensor
    return split


def is_quantized(name: str) -> bool:
    """Whether a bf16 tensor is the weight of a layer that is quantized."""
    return (
        name.startswith(f"{DECODER}layers.")
        and name.endswith(".weight")
        and name.split(".")[-2] in PROJECTIONS
    )


def write_quantized(
    source: Path,
    target: Path,
    scheme: str,
    layout: Layout = OURS,
    keep: Callable[[str], bool] | None = None,
    edit: Callable[[Tensors], object] | None = None,
    edit_config: Callable[[dict], object] | None = None,
) -> Path:
    """Quantize the checkpoint at ``source``; ``edit`` may then change tensors, by their names.

    keep: weights that stay as they are, by their bf16 names; the layout has to list its modules.
    ``weight_global_scale`` is one value for the layers that vLLM fuses, as LLM Compressor has it.
    """
    shutil.copytree(source, target)
    tensors = split_experts(load_file(source / "model.safetensors"))
    chosen = {name for name in tensors if is_quantized(name) and not (keep and keep(name))}
    divisors: dict[str, float] = {}
    for name, tensor in tensors.items():
        if name in chosen:
            key = _fused(name)
            divisor = 448.0 * 6.0 / float(tensor.abs().max())
            divisors[key] = min(divisor, divisors.get(key, divisor))
    written: Tensors = {}
    for name, tensor in tensors.items():
        place = layout.prefix + name.removeprefix(DECODER) if name.startswith(DECODER) else name
        if name in chosen:
            parts = quantize(tensor.float(), scheme, float(np.float32(divisors[_fused(name)])))
            stem = place.removesuffix("weight")
            written |= {f"{stem}{part}": value for part, value in parts.items()}
        else:
            # Encoder and decoder keep a layer scalar each, where both halves have a name.
            written.setdefault(place, tensor.contiguous())
    if edit is not None:
        edit(written)
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, layout, written)
    if edit_config is not None:
        edit_config(config["quantization_config"])
    (target / "config.json").write_text(json.dumps(config))
    return target


def quantization_config(scheme: str, layout: Layout, written: Tensors) -> dict:
    """What compressed-tensors adds to config.json."""
    weights, inputs = copy.deepcopy(SIDES[scheme])
    ignore = list(PATTERNS)
    if layout.expands_ignore:
        modules = {name.rpartition(".")[0] for name in written if name.endswith(".weight")}
        linears = {module for module in modules if module.endswith(("proj", "linear"))}
        kept = (module for module in linears if f"{module}.weight_scale" not in written)
        ignore = ["lm_head", *sorted(kept)]
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": FORMATS[scheme],
            }
        },
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": FORMATS[scheme],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore,
    }


# Of NVIDIA Model Optimizer: its names for an NVFP4 layer's tensors, and what it does not quantize.
MODEL_OPTIMIZER = {
    "weight_packed": "weight",
    "weight_scale": "weight_scale",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}
EXPERTS_ALONE = (
    "lm_head",
    "model.encoder.embed_vision*",
    "*mlp*",
    "*router*",
    "*self_attn*",
    "*self_conditioning*",
    "*vision_tower*",
)


def write_modelopt(
    source: Path,
    target: Path,
    excluded: Sequence[str] = EXPERTS_ALONE,
    edit: Callable[[Tensors], object] | None = None,
    **config: object,
) -> Path:
    """Quantize the checkpoint at ``source`` to NVFP4, as Model Optimizer writes it.

    Args:
        excluded: modules that are not quantized; parts of names with or without stars.
        edit: may change tensors, by their names.
        config: of the quantization_config, in addition or instead.
    """

    def keep(name: str) -> bool:
        return any(part.strip("*") in name for part in excluded)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            stem = name.removesuffix("weight_packed")
            parts = {old: tensors.pop(f"{stem}{old}") for old in MODEL_OPTIMIZER}
            for old, new in MODEL_OPTIMIZER.items():
                is_divisor = old.endswith("_global_scale")
                tensors[f"{stem}{new}"] = 1 / parts[old][0] if is_divisor else parts[old]
        if edit is not None:
            edit(tensors)

    write_quantized(source, target, "nvfp4", keep=keep, edit=rename)
    written = json.loads((target / "config.json").read_text())
    numbers4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    written["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": numbers4, "weights": numbers4}},
        "ignore": list(excluded),
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    } | config
    (target / "config.json").write_text(json.dumps(written))
    return target


def layers_of(path: Path) -> dict[str, Tensors]:
    """The tensors of each linear layer of a checkpoint, under its decoder name, by suffix."""
    layers: dict[str, Tensors] = {}
    for name, tensor in _load(path).items():
        module, _, suffix = name.rpartition(".")
        if name.startswith(f"{DECODER}layers.") and module.split(".")[-1] in PROJECTIONS:
            layers.setdefault(module, {})[suffix] = tensor
    return layers


def dequantized(path: Path) -> Tensors:
    """A quantized checkpoint's tensors as a bf16 one has them: one copy, experts fused, fp32."""
    layers = layers_of(path)
    tensors: Tensors = {
        name: tensor.float()
        for name, tensor in _load(path).items()
        if name.rpartition(".")[0] not in layers
    }
    for module, parts in layers.items():
        is_plain = len(parts) == 1
        tensors[f"{module}.weight"] = parts["weight"].float() if is_plain else dequantize(parts)
    return fuse_experts(tensors)


def _load(path: Path) -> Tensors:
    return {
        _decoder_name(name): tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def fuse_experts(tensors: Tensors) -> Tensors:
    """The inverse of ``split_experts``."""
    fused: Tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stems = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for stem in stems:
        count = sum(name.startswith(f"{stem}.experts.") and "down" in name for name in tensors)
        part = lambda i, kind, stem=stem: tensors[f"{stem}.experts.{i}.{kind}_proj.weight"]  # noqa: E731
        fused[f"{stem}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((part(i, "gate"), part(i, "up"))) for i in range(count)]
        )
        fused[f"{stem}.experts.down_proj"] = torch.stack([part(i, "down") for i in range(count)])
    return fused


def _decoder_name(name: str) -> str:
    if name.endswith("layer_scalar") and name.startswith(ENCODER_ONLY.prefix):
        return name
    for prefix in (ENCODER_ONLY.prefix, DECODER):
        if name.startswith(prefix):
            return DECODER + name.removeprefix(prefix)
    if name.startswith("model.encoder."):
        return name
    return DECODER + name.removeprefix("model.") if name.startswith("model.") else name


def _fused(name: str) -> str:
    """The same name for all layers that vLLM fuses into one: q, k, v; gate, up."""
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for projection in group:
            name = name.replace(projection, group[0])
    return name
