"""The largest inputs of every linear layer, measured by LLM Compressor's observers.

The model answers prompts as it does when served: the encoder reads a prompt and the blocks that it
wrote, the decoder denoises canvases from noise. The two halves are two sets of modules with tied
weights in Hugging Face's model; observers on one of them would never see the other's inputs, and
experts that no token was sent to would have no scale. So the halves are made to share their linear
layers, and every expert sees every token while the routed ones alone answer.

Imports LLM Compressor: only in its environment.
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
from dllm.quantize.prompts import Message
from dllm.settings.command import CommandError


@dataclass(frozen=True)
class Calibration:
    """How the model is run.

    Attributes:
        prompts: the conversations that it answers, one at a time.
        blocks: how many canvases it fills for each, if it does not end before.
        seed: of the canvases' noise.
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
    """The static scale of each layer's inputs, ``[1]`` fp32, a divisor.

    The whole model is in memory (of ``device``) once, and none of it when this returns; while a
    layer's experts are split, that layer's are there twice.

    Args:
        path: a checkpoint.
        modules: the linear layers whose inputs are wanted, by their names in a checkpoint.
        preset: compressed-tensors' name of the scheme.
        on_prompt: called with the number of prompts answered.

    Raises:
        CommandError: a layer has seen nothing, only zeros, or something not finite; LLM Compressor
            would go on with a scale of 1.
    """
    disable_progress_bar()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype="auto", device_map={"": device}
    ).eval()
    share_halves(model)
    observers = observe_inputs(model, modules, preset)
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

    Experts are split layer by layer, and each stack is freed before the next: sharing them only
    afterwards would keep every stack alive through the other half.
    """
    encoder, decoder = model.model.encoder.language_model, model.model.decoder
    for reading, writing in zip(encoder.layers, decoder.layers, strict=True):
        split = LinearExperts2D.get_linear_experts_cls(type(writing.experts))
        with torch.device(model.device):  # it makes the new ones on the default device
            writing.experts = split.from_experts_module(writing.experts, model.config.text_config)
        reading.experts = writing.experts
        for name, module in list(writing.named_modules()):
            if isinstance(module, nn.Linear) and not name.startswith("experts."):
                reading.set_submodule(name, module)


def observe_inputs(
    model: DiffusionGemmaForBlockDiffusion, modules: Sequence[str], preset: str
) -> dict[str, Observer]:
    """An observer of each layer's inputs, by the layer's name in a checkpoint."""
    scheme = preset_name_to_scheme(preset, ["Linear"]).input_activations
    assert scheme is not None and scheme.observer is not None
    layers = dict(model.model.decoder.named_modules())
    observers = {}
    for module in modules:
        observer = Observer.load_from_registry(scheme.observer, base_name="input", args=scheme)
        layers[module.removeprefix(DECODER)].register_forward_pre_hook(
            lambda _, inputs, observer=observer: observer(inputs[0]) and None
        )
        observers[module] = observer
    return observers


def input_scales(observers: Mapping[str, Observer]) -> dict[str, torch.Tensor]:
    """The scales of what was observed; raises as ``measure_inputs``."""
    bad = [name for name, observer in observers.items() if not _has_seen(observer)]
    if bad:
        raise CommandError(
            f"calibration gave no finite, non-zero input to {few(bad)}. Give more or other prompts "
            "(--calibration, --samples), or check that the model answers at all."
        )
    return {name: _scale(observer) for name, observer in observers.items()}


def _has_seen(observer: Observer) -> bool:
    if not observer.has_statistics:
        return False
    largest = torch.maximum(observer.max_vals.abs().max(), observer.min_vals.abs().max())
    return bool(largest.isfinite()) and float(largest) > 0


def _scale(observer: Observer) -> torch.Tensor:
    scale = observer.get_global_scale()
    assert scale is not None, "only formats with a static global scale are calibrated"
    return scale.float().reshape(1).cpu()
