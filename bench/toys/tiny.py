"""A DiffusionGemma checkpoint with random weights, in the format of the released one.

``python -m bench.toys.tiny`` writes the weights of ``checkpoints/tiny-random``, as `make setup-dev`
does; its other files are in the repository, and checkpoints elsewhere get copies. As in the 26B
model, full layers have twice the head size, half the key heads, and k = v; the vision tower is
there because the reference cannot be constructed without one. Tests write variants::

    config = tiny_config(canvas_length=16, sliding_window=40)
    write_checkpoint(tmp_path, config, seed=3)

Every tensor comes from a random generator of its own, which is seeded with the seed and the
tensor's name. So the same call writes the same bytes, and two checkpoints with the same seed are
equal in every tensor that has the same name and shape in both. ``shapes`` gives names and shapes.
"""

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bench.context import ROOT
from dllm.models.gemma.shapes import Config, tensor_shapes
from dllm.models.gemma.weights import DECODER

BUNDLED = ROOT / "checkpoints/tiny-random"  # whose tokenizer all of them have


def tiny_config(**overrides: object) -> Config:
    """The config.json of a tiny DiffusionGemma, as nested plain data.

    ``overrides`` are fields of config.json or of its text_config, by name. ``layer_types`` sets
    ``num_hidden_layers``. ``num_experts=None`` describes a model without experts, and
    ``vision_config=None`` one without a vision tower. The reference constructs neither; for the
    first there are muted experts (tests). Raises KeyError: there is no such field.
    """
    config = read_json(BUNDLED / "config.json")
    text: Config = config["text_config"]  # type: ignore[assignment]
    for key, value in overrides.items():
        where = config if key in config else text
        if key not in where:
            raise KeyError(f"{key!r}; known: {', '.join(sorted({*config, *text}))}")
        where[key] = copy.deepcopy(value)
    if "layer_types" in overrides:
        text["num_hidden_layers"] = len(text["layer_types"])  # type: ignore[arg-type]
    if len(text["layer_types"]) != text["num_hidden_layers"]:  # type: ignore[arg-type]
        raise ValueError("num_hidden_layers differs from the length of layer_types; set the latter")
    if text["num_experts"] is None:
        text["top_k_experts"] = text["moe_intermediate_size"] = None
    return config


# How much each layer adds to the residual stream, and the scale of the logits. With these values a
# random model behaves like a trained one: entropies are between 0 and 0.7 nats in a canvas, and a
# canvas converges after 3 to 16 denoise steps. With 1.0 and 1.0 every position has the entropy of
# noise and no canvas converges. With a smaller RESIDUAL the model copies its first canvas, which
# converges in 2 steps.
RESIDUAL = 0.475
FINAL_NORM = 5.0


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The fp32 value of one tensor, a function of its name, its shape and the seed."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("layer_scalar"):
        value = 0.8 + 0.1 * np.tanh(normal)  # 0.7 to 0.9; the encoder's differ from the decoder's
    elif name == f"{DECODER}norm.weight":
        value = FINAL_NORM * (1.0 + 0.1 * normal)
    elif "post_attention" in name or "post_feedforward_layernorm.weight" in name:
        value = RESIDUAL * (1.0 + 0.1 * normal)
    elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
        value = 1.0 + 0.1 * normal
    elif name == f"{DECODER}embed_tokens.weight":
        value = normal * shape[1] ** -0.5  # the reference scales embeddings by sqrt(hidden)
    elif name.endswith("router.proj.weight"):
        # The router's input is scaled by hidden ** -0.5, so its logits have a standard deviation of
        # about 2: some experts are clearly preferred to others.
        value = 2.0 * normal
    else:
        value = normal * shape[-1] ** -0.5
    return torch.from_numpy(value).float()


def write_checkpoint(
    path: Path,
    config: Config | None = None,
    seed: int = 0,
    *,
    generation: Config | None = None,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Path:
    """Write a whole checkpoint directory; the same arguments give the same bytes.

    ``generation``: fields of generation_config.json to replace or to add. ``change`` may change the
    tensors, in fp32, before they are written in the config's dtype.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    tensors = {name: _draw(name, shape, seed) for name, shape in tensor_shapes(config).items()}
    change(tensors)
    dtype, weights = getattr(torch, str(config["dtype"])), path / "model.safetensors"
    written = {name: tensor.to(dtype) for name, tensor in sorted(tensors.items())}
    save_file(written, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes it readable by its owner only
    write_json(path / "config.json", config)
    bundled = read_json(BUNDLED / "generation_config.json")
    write_json(path / "generation_config.json", bundled | (generation or {}))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (path / name).write_bytes((BUNDLED / name).read_bytes())
    text: dict = config["text_config"]  # type: ignore[assignment]
    limit = {"model_max_length": text["max_position_embeddings"]}
    tokenizer = read_json(BUNDLED / "tokenizer_config.json")
    write_json(path / "tokenizer_config.json", tokenizer | limit)
    return path


def read_json(path: Path) -> Config:
    found: Config = json.loads(path.read_text())
    return found


def write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    print(write_checkpoint(BUNDLED))
