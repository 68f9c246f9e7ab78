"""Calibration: runs the model on prompts to find the largest inputs of every linear layer.

NVFP4 needs a static scale for the inputs of each layer. LLM Compressor's observers measure it while
Hugging Face's model answers prompts: the encoder reads a prompt and the blocks written so far, the
decoder denoises canvases. Two things are changed in the model before:

- Encoder and decoder are two sets of modules with the same weights. An observer on one would not
  see the inputs of the other, so both are made to use the same linear layers.
- An expert that gets no token would have no scale. So every expert sees every token; the answers
  still come from those that the router chose.

This module imports LLM Compressor, so it works only in that environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.observers import Observer
from torch import nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion
from transformers.utils.logging import disable_progress_bar

from dllm.models.gemma.weights import DECODER
from dllm.quantize.checkpoint import few
from dllm.settings.command import CommandError
from dllm.tasks.prompts import Message


@dataclass(frozen=True)
class Calibration:
    """What the model is run on.

    Attributes:
        prompts: conversations that it answers, one at a time.
        blocks: how many canvases it fills for each, unless the answer ends before.
        seed: of the noise that canvases start from.
    """

    prompts: list[list[Message]]
    blocks: int
    seed: int


def measure_inputs(
    path: Path,
    modules: Sequence[str],
    preset: str,
    device: str,
    calibration: Calibration,
    on_prompt: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Measure the static scale of each layer's inputs: ``[1]`` fp32, a divisor, by layer name.

    Takes the memory (of ``device``) for the whole model, plus the experts of one layer while they
    are split. The memory is free again when this returns.

    Args:
        path: a checkpoint that is not quantized.
        modules: the linear layers to measure, by their names in a checkpoint.
        preset: compressed-tensors' name of the scheme.
        on_prompt: called with the number of prompts answered so far.

    Raises:
        CommandError: a layer had no input, only zeros, or one that is not finite. (LLM Compressor
            would use a scale of 1 then.)
    """
    disable_progress_bar()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype="auto", device_map={"": device}
    ).eval()
    share_halves(model)
    layers = dict(model.model.decoder.named_modules(prefix=DECODER.removesuffix(".")))
    observers = observe_inputs({module: layers[module] for module in modules}, preset)
    tokenizer = AutoTokenizer.from_pretrained(path)
    length = calibration.blocks * model.config.canvas_length
    for index, messages in enumerate(calibration.prompts):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        torch.manual_seed(calibration.seed + index)
        with torch.inference_mode(), moe_calibration_context():
            model.generate(ids.to(device), max_new_tokens=length)
        on_prompt(index + 1)
    return input_scales(observers)


def share_halves(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Make the encoder use the decoder's linear layers and experts, and split the experts.

    The experts of a layer are one tensor; split, each has linear layers of its own that an observer
    can be put on. This is done layer by layer in both halves at once, so that the tensor is freed
    before the next layer is split. If the encoder followed later, it would keep all of them alive.
    """
    encoder, decoder = model.model.encoder.language_model, model.model.decoder
    for reading, writing in zip(encoder.layers, decoder.layers, strict=True):
        split = LinearExperts2D.get_linear_experts_cls(type(writing.experts))
        with torch.device(model.device):  # the new modules are made on torch's default device
            writing.experts = split.from_experts_module(writing.experts, model.config.text_config)
        reading.experts = writing.experts
        for name, module in list(writing.named_modules()):
            if isinstance(module, nn.Linear) and not name.startswith("experts."):
                reading.set_submodule(name, module)


def observe_inputs(layers: Mapping[str, nn.Module], preset: str) -> dict[str, Observer]:
    """Put an observer on each layer's inputs; returns them by the same names."""
    scheme = preset_name_to_scheme(preset, ["Linear"]).input_activations
    assert scheme is not None and scheme.observer is not None
    observers = {}
    for name, layer in layers.items():
        observer = Observer.load_from_registry(scheme.observer, base_name="input", args=scheme)
        # "and None": what a hook returns would replace the inputs.
        layer.register_forward_pre_hook(
            lambda _, inputs, observer=observer: observer(inputs[0]) and None
        )
        observers[name] = observer
    return observers


def input_scales(observers: Mapping[str, Observer]) -> dict[str, torch.Tensor]:
    """The scales that follow from the observed inputs; raises as ``measure_inputs``."""
    bad = [name for name, observer in observers.items() if not _saw_inputs(observer)]
    if bad:
        raise CommandError(
            f"calibration gave no finite, non-zero input to {few(bad)}. Give more or other prompts "
            "(--calibration, --samples), or check that the model answers at all."
        )
    return {name: _scale(observer) for name, observer in observers.items()}


def _saw_inputs(observer: Observer) -> bool:
    """Whether the largest input was finite and not 0."""
    if not observer.has_statistics:
        return False
    largest = torch.maximum(observer.max_vals.abs().max(), observer.min_vals.abs().max())
    return bool(largest.isfinite()) and float(largest) > 0


def _scale(observer: Observer) -> torch.Tensor:
    scale = observer.get_global_scale()
    assert scale is not None, "only formats with a static global scale are calibrated"
    return scale.float().reshape(1).cpu()
