"""Random DiffusionGemma checkpoints with other weights or files than ``bench.toys.tiny`` writes."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.toys.tiny import tiny_config, write_checkpoint, write_json
from dllm.models.gemma.shapes import Config
from dllm.models.gemma.weights import DECODER, ENCODER


def write_variant(
    path: Path,
    config: Config | None = None,
    seed: int = 0,
    *,
    generation: Config | None = None,
    image_processor: bool = False,
    encoder_scalars: Sequence[float] | None = None,
    decoder_scalars: Sequence[float] | None = None,
    encoder_copies: bool = False,
    mute_experts: bool = False,
) -> Path:
    """``write_checkpoint`` with variants.

    Args:
        image_processor: also write the files that image requests need.
        encoder_scalars, decoder_scalars: ``layer_scalar`` of each layer. By default they are random
            numbers from 0.7 to 0.9, different for the encoder (causal rows) and the decoder
            (canvas rows).
        encoder_copies: also the encoder's copies of the shared weights.
        mute_experts: experts that return 0, and a neutral extra norm behind the MLP. The model then
            computes the same as the model without experts (``num_experts=None``) and the same seed,
            except for the epsilon of that norm. So the reference, which cannot construct a model
            without experts, can be compared with one.
    """

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for prefix, scalars in ((ENCODER, encoder_scalars), (DECODER, decoder_scalars)):
            for index, value in enumerate(scalars or ()):
                tensors[f"{prefix}layers.{index}.layer_scalar"] = torch.tensor([float(value)])
        for name, tensor in tensors.items() if mute_experts else ():
            if name.endswith("experts.down_proj"):
                tensor.zero_()
            elif name.endswith("post_feedforward_layernorm_1.weight"):
                tensor.fill_(1.0)
        for name in [one for one in tensors if one.startswith(DECODER)] if encoder_copies else ():
            if "self_conditioning" not in name and not name.endswith("layer_scalar"):
                tensors[ENCODER + name.removeprefix(DECODER)] = tensors[name].clone()

    config = tiny_config() if config is None else config
    write_checkpoint(path, config, seed, generation=generation, change=change)
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
    write_json(path / "processor_config.json", processor)
    tokenizer_config = path / "tokenizer_config.json"
    names = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
    # Never used, but required as well.
    names |= dict.fromkeys(("boa_token", "audio_token", "eoa_token"), "<unk>")
    write_json(tokenizer_config, json.loads(tokenizer_config.read_text()) | names)
