"""A DiffusionGemma checkpoint with random weights, in the format of the released one.

``python -m bench.toys.tiny`` writes ``checkpoints/tiny-random``, as `make setup-dev` does; its
tokenizer is in the repository, and checkpoints elsewhere get a copy of it. Tests write variants::

    config = tiny_config(canvas_length=16, sliding_window=40)
    write_checkpoint(tmp_path, config, seed=3)

Every tensor comes from a random generator of its own, which is seeded with the seed and the
tensor's name. So the same call writes the same bytes, and two checkpoints with the same seed are
equal in every tensor that has the same name and shape in both. ``shapes`` gives names and shapes.
"""

import argparse
import copy
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.context import ROOT
from bench.toys.suite import TOKEN_ID
from dllm.models.gemma.shapes import Config, tensor_shapes
from dllm.models.gemma.weights import DECODER, ENCODER

BUNDLED = ROOT / "checkpoints/tiny-random"  # whose tokenizer all of them have
VOCAB_SIZE = 512

# --------------------------------------------------------------------------------------------------
# config.json and generation_config.json


def _text_config() -> Config:
    return {
        "model_type": "diffusion_gemma_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        # As in the 26B model: full layers have twice the head size, half the key heads, and k = v.
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "sliding_window": 64,
        "max_position_embeddings": 4096,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_bidirectional_attention": None,
        "tie_word_embeddings": True,
        "pad_token_id": TOKEN_ID["<pad>"],
        "eos_token_id": TOKEN_ID["<eos>"],
        "bos_token_id": TOKEN_ID["<bos>"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    }


def _vision_config() -> Config:
    """A very small vision tower; the reference's model cannot be constructed without one."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
        "use_clipped_linears": False,
        "standardize": False,
    }


def tiny_config(**overrides: object) -> Config:
    """The config.json of a tiny DiffusionGemma, as nested plain data.

    ``overrides`` are fields of config.json or of its text_config, by name. ``layer_types`` sets
    ``num_hidden_layers``. ``num_experts=None`` describes a model without experts, and
    ``vision_config=None`` one without a vision tower. The reference constructs neither; for the
    first there is ``write_checkpoint(mute_experts=True)``. Raises KeyError: there is no such field.
    """
    config: Config = {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "dtype": "bfloat16",
        "canvas_length": 32,
        "canvas_window": "anchored",
        "tie_word_embeddings": True,
        "boi_token_id": TOKEN_ID["<|image>"],
        "image_token_id": TOKEN_ID["<|image|>"],
        "eoi_token_id": TOKEN_ID["<image|>"],
        "text_config": _text_config(),
        "vision_config": _vision_config(),
    }
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


def generation_config() -> Config:
    """generation_config.json, as the reference's DiffusionGemmaGenerationConfig saves it."""
    return {
        "bos_token_id": TOKEN_ID["<bos>"],
        "pad_token_id": TOKEN_ID["<pad>"],
        "eos_token_id": [TOKEN_ID["<eos>"], TOKEN_ID["<turn|>"]],
        "max_new_tokens": 256,
        "max_denoising_steps": 16,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.0},
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 1,
        "confidence_threshold": 0.2,
    }


# --------------------------------------------------------------------------------------------------
# Weights


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


def make_tensors(
    config: Config,
    seed: int = 0,
    *,
    encoder_scalars: Sequence[float] | None = None,
    decoder_scalars: Sequence[float] | None = None,
    encoder_copies: bool = False,
    mute_experts: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name, in the config's dtype.

    Args:
        encoder_scalars, decoder_scalars: ``layer_scalar`` of each layer. By default they are random
            numbers from 0.7 to 0.9, different for the encoder (causal rows) and the decoder
            (canvas rows).
        encoder_copies: also the encoder's copies of the shared weights.
        mute_experts: experts that return 0, and a neutral extra norm behind the MLP. The model then
            computes the same as the model without experts (``num_experts=None``) and the same seed,
            except for the epsilon of that norm. So the reference, which cannot construct a model
            without experts, can be compared with one.
    """
    dtype = getattr(torch, str(config["dtype"]))
    tensors = {name: _draw(name, shape, seed) for name, shape in tensor_shapes(config).items()}
    for prefix, scalars in ((ENCODER, encoder_scalars), (DECODER, decoder_scalars)):
        for index, value in enumerate(scalars or ()):
            tensors[f"{prefix}layers.{index}.layer_scalar"] = torch.tensor([float(value)])
    if mute_experts:
        for name, tensor in tensors.items():
            if name.endswith("experts.down_proj"):
                tensor.zero_()
            elif name.endswith("post_feedforward_layernorm_1.weight"):
                tensor.fill_(1.0)
    if encoder_copies:
        for name in [name for name in tensors if name.startswith(DECODER)]:
            copy_name = ENCODER + name.removeprefix(DECODER)
            if "self_conditioning" not in name and not name.endswith("layer_scalar"):
                tensors[copy_name] = tensors[name].clone()
    return {name: tensor.to(dtype) for name, tensor in sorted(tensors.items())}


# --------------------------------------------------------------------------------------------------
# Writing


def write_checkpoint(
    path: str | Path,
    config: Config | None = None,
    seed: int = 0,
    *,
    generation: Config | None = None,
    image_processor: bool = False,
    **variants: Any,
) -> Path:
    """Write a whole checkpoint directory; the same arguments give the same bytes.

    Args:
        generation: fields of generation_config.json to replace or to add.
        image_processor: also write the files that image requests need.
        variants: of the weights, as ``make_tensors`` takes them.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    tensors = make_tensors(config, seed, **variants)
    weights = path / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes it readable by its owner only
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", generation_config() | (generation or {}))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (path / name).write_bytes((BUNDLED / name).read_bytes())
    text: dict = config["text_config"]  # type: ignore[assignment]
    limit = {"model_max_length": text["max_position_embeddings"]}
    tokenizer = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    _write_json(path / "tokenizer_config.json", tokenizer | limit)
    if image_processor:
        _write_image_processor(path, config["vision_config"])  # type: ignore[arg-type]
    return path


def _write_image_processor(path: Path, vision: dict) -> None:
    """processor_config.json, and the names of the image tokens in tokenizer_config.json."""
    patches = {name: vision[name] for name in ("patch_size", "pooling_kernel_size")}
    processor: Config = {
        "processor_class": "Gemma4Processor",
        "image_seq_length": vision["default_output_length"],
        "image_processor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "max_soft_tokens": vision["default_output_length"],
            **patches,
        },
        # Never used, but the processor cannot be constructed without them.
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **patches},
    }
    _write_json(path / "processor_config.json", processor)
    tokenizer_config = path / "tokenizer_config.json"
    names = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    # Never used, but required as well.
    names |= dict.fromkeys(("boa_token", "audio_token", "eoa_token"), "<unk>")
    _write_json(tokenizer_config, json.loads(tokenizer_config.read_text()) | names)


def _write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled random-weight checkpoint.")
    parser.add_argument("path", nargs="?", default=BUNDLED)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_checkpoint(args.path, seed=args.seed))


if __name__ == "__main__":
    main()
