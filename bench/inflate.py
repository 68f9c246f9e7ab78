"""Copies of tiny-ar with more layers and the same answers, and of its drafter for them.

    python -m bench.inflate --out /tmp/inflated                # as deep as `bench.drafter` takes it
    python -m bench.inflate --out /tmp/inflated --layers 40    # 40 in all
    python -m bench.inflate --out /tmp/draft --layers 4        # only the first 4: another model

Written to --out: ``target`` and, if there are more layers, ``drafter``.

A step of tiny-ar costs about as much as a pass of its drafter. With Qwen3-8B and its drafter it
costs 4.5 times as much (``WEIGHTS_RATIO``), because at batch 1 a step takes as long as its weights
take to read. The deeper copy shall have this ratio. Its additional layers add exactly zero:
``o_proj`` and ``down_proj`` are zero. Their other weights are those of an original layer, so that
no work can be left out.

They stand in front of the original layers, where what they add zero to, an embedding, has the
model's precision. Behind a layer vLLM normalizes a sum before it is rounded, so that an additional
layer there would change logits in bf16. The copy of the drafter differs in its config.json alone,
which names the same layers by their new places.

How many layers that takes (``LAYERS``) follows from measured times: of a step without drafting at
two depths, and of a pass of the drafter (``matching_layers``). They depend on the machine.
``bench.drafter`` prints the number that matches, and the ratio that it found, beside its tables.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.context import ROOT

TARGET, DRAFTER = ROOT / "checkpoints/tiny-ar", ROOT / "checkpoints/tiny-drafter"
# In CPU time, on an AMD EPYC with other work: a step takes 1.29 ms with 5 layers and 5.48 with 29,
# a pass with 15 drafts 1.67 ms.
LAYERS = 41
LAYER = re.compile(r"^model\.layers\.(\d+)\.")

# Weights that one forward pass reads: Qwen3-8B, and z-lab's Qwen3-8B-DFlash-b16, whose five layers
# have the same shape and whose `fc` joins the outputs of five layers of the target.
HIDDEN, INTERMEDIATE, KV, VOCABULARY = 4096, 12288, 8 * 128, 151936
LAYER_WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KV + 3 * INTERMEDIATE)
HEAD_WEIGHTS = HIDDEN * VOCABULARY
STEP_WEIGHTS = 36 * LAYER_WEIGHTS + HEAD_WEIGHTS
PASS_WEIGHTS = 5 * LAYER_WEIGHTS + 5 * HIDDEN**2 + HEAD_WEIGHTS
WEIGHTS_RATIO = STEP_WEIGHTS / PASS_WEIGHTS


def matching_layers(shallow: tuple[int, float], deep: tuple[int, float], pass_ms: float) -> int:
    """Layers whose step takes ``WEIGHTS_RATIO`` passes of the drafter.

    Args:
        shallow, deep: layers of a target, and ms of its step without drafting.
        pass_ms: of the drafter.
    """
    layer_ms = (deep[1] - shallow[1]) / (deep[0] - shallow[0])
    return round(shallow[0] + (WEIGHTS_RATIO * pass_ms - shallow[1]) / layer_ms)


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
    return int(text_config(model)["num_hidden_layers"])


def text_config(model: Path) -> dict[str, Any]:
    """What a checkpoint's config.json says of its language model."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config | config.get("text_config", {})


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the copies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the copies")
    parser.add_argument("--layers", type=int, default=LAYERS, help="in all (%(default)s)")
    given = parser.parse_args(arguments)
    if given.layers < 1:
        parser.error(f"--layers {given.layers}; allowed: at least 1.")
    print(write_target(given.out / "target", given.layers))
    if given.layers >= num_layers_of(TARGET):
        print(write_drafter(given.out / "drafter", given.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
