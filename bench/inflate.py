"""Copies of tiny-ar with more layers and the same answers, and of its drafter for them.

A step of tiny-ar costs about as much as a pass of its drafter. With Qwen3-8B and its drafter it
costs 4.5 times as much, because at batch 1 both take as long as their weights take to read: those
of 36 layers and the head, and those of 5 layers, `fc` and the head. The deeper copy shall come
closer to this ratio. Its additional layers add exactly zero: ``o_proj`` and ``down_proj`` are zero.
Their other weights are those of an original layer, so that no work can be left out.

They stand in front of the original layers, where what they add zero to, an embedding, has the
model's precision. Behind a layer vLLM normalizes a sum before it is rounded, so that an additional
layer there would change logits in bf16. The copy of the drafter differs in its config.json alone,
which names the same layers by their new places.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.context import ROOT

TARGET, DRAFTER = ROOT / "checkpoints/tiny-ar", ROOT / "checkpoints/tiny-drafter"
LAYERS = 41  # on an AMD EPYC that gives the ratio, about
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def write_target(out: Path, num_layers: int, source: Path = TARGET) -> Path:
    """Write the checkpoint with so many layers to ``out``; fewer than it has are its first ones."""
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    out.mkdir(parents=True, exist_ok=True)
    changed = with_layers(weights, config["num_hidden_layers"], num_layers)
    save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
    write_config(out, config | {"num_hidden_layers": num_layers})
    for pattern in ("tokenizer*.json", "generation_config.json", "chat_template.jinja"):
        for file in source.glob(pattern):
            shutil.copy(file, out)
    return out


def write_drafter(out: Path, num_layers: int, source: Path = DRAFTER) -> Path:
    """Write the drafter to ``out``, for a target with so many layers."""
    config = json.loads((source / "config.json").read_text())
    added, dflash = num_layers - config["num_target_layers"], config["dflash_config"]
    dflash["target_layer_ids"] = [layer + added for layer in dflash["target_layer_ids"]]
    out.mkdir(parents=True, exist_ok=True)
    write_config(out, config | {"num_target_layers": num_layers})
    shutil.copy(source / "model.safetensors", out)
    return out


def num_layers_of(model: Path) -> int:
    """Of a checkpoint."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def write_config(folder: Path, config: dict[str, object]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def with_layers(
    weights: dict[str, torch.Tensor], num_present: int, num_layers: int
) -> dict[str, torch.Tensor]:
    """The original layers, in front of them copies that add zero to the residual stream."""
    added = max(0, num_layers - num_present)
    found = {name: one for name, one in weights.items() if not LAYER.match(name)}
    for name, one in weights.items():
        if not (match := LAYER.match(name)) or int(match[1]) >= num_layers:
            continue
        layer = int(match[1])
        found[LAYER.sub(f"model.layers.{added + layer}.", name)] = one
        writes = any(part in name for part in ("o_proj", "down_proj"))
        for index in range(layer, added, num_present):
            copied = torch.zeros_like(one) if writes else one.clone()
            found[LAYER.sub(f"model.layers.{index}.", name)] = copied
    return found
