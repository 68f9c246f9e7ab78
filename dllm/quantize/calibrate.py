"""Calibration: runs the model on prompts to find the largest inputs of every linear layer.

NVFP4 needs a static scale for the inputs of each layer. LLM Compressor's observers measure it while
Hugging Face's model answers prompts: a DiffusionGemma in the checkpoint's dtype, SDAR and LLaDA2 in
fp32. Two things are changed in the model before:

- DiffusionGemma's encoder and decoder are two sets of modules with the same weights. An observer on
  one would not see the inputs of the other, so both are made to use the same linear layers.
- An expert that gets no token would have no scale. So every expert sees every token; the answers
  still come from those that the router chose.

This module imports LLM Compressor, so it works only in that environment.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.observers import Observer
from torch import nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from dllm.models.gemma.weights import DECODER
from dllm.models.llada2.reference import glm4_name
from dllm.models.nemotron.shapes import TO_TRANSFORMERS
from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from dllm.quantize.checkpoint import DIFFUSION_GEMMA, few
from dllm.quantize.job import Job
from dllm.settings.command import CommandError

# Answers a prompt: its token ids, and its number.
Respond = Callable[[list[int], int], object]


def measure_inputs(
    job: Job, modules: Sequence[str], on_prompt: Callable[[int], None]
) -> dict[str, torch.Tensor]:
    """The static scale of each layer's inputs: ``[1]`` fp32, a divisor, by layer name.

    Takes the memory (of ``job.device``) for the whole model, plus the experts of one layer while
    they are split. The memory is free again when this returns. ``on_prompt`` gets the number of
    prompts answered so far. Raises CommandError: a layer had no input, only zeros, or one that is
    not finite. (LLM Compressor would use a scale of 1 then.)
    """
    disable_progress_bar()
    is_gemma = job.source.config["architectures"][0] == DIFFUSION_GEMMA  # type: ignore[index]
    layers, respond = (_diffusion_gemma if is_gemma else _masked)(job, modules)
    observers = observe_inputs(layers, job.scheme.preset)
    tokenizer = AutoTokenizer.from_pretrained(job.source.path)
    for index, messages in enumerate(job.prompts):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with moe_calibration_context():
            respond(ids, index)
        on_prompt(index + 1)
    return input_scales(observers)


def _diffusion_gemma(job: Job, modules: Sequence[str]) -> tuple[dict[str, nn.Module], Respond]:
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        job.source.path, dtype="auto", device_map={"": job.device}
    ).eval()
    share_halves(model)
    layers = dict(model.model.decoder.named_modules(prefix=DECODER.removesuffix(".")))

    @torch.inference_mode()
    def respond(ids: list[int], index: int) -> None:
        torch.manual_seed(job.seed + index)
        length = job.blocks * model.config.canvas_length
        model.generate(torch.tensor([ids], device=job.device), max_new_tokens=length)

    return {module: layers[module] for module in modules}, respond


def _masked(job: Job, modules: Sequence[str]) -> tuple[dict[str, nn.Module], Respond]:
    rule = DecodingRule.of_checkpoint(job.source.path)
    with torch.device(job.device):
        model = load_model(job.source.path)
        split_experts(model)
    layers = dict(model.named_modules())

    def respond(ids: list[int], index: int) -> None:
        with torch.device(job.device):
            generate_blocks(
                model, [ids], rule, job.blocks * (rule.canvas_length or rule.block_size)
            )

    def own_name(module: str) -> str:
        """A layer's name in transformers; of fused q, k and v in the checkpoint, that of q."""
        name = f"{module}."
        for released, own in TO_TRANSFORMERS.items():
            name = re.sub(released, own, name)
        return glm4_name(name).removesuffix(".")

    return {module: layers[own_name(module)] for module in modules}, respond


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
    """By the checkpoint's names of the layers; they see every forward pass from then on.

    ``preset``: of compressed-tensors, one with scales for inputs.
    """
    scheme = preset_name_to_scheme(preset, ["Linear"]).input_activations
    assert scheme is not None and scheme.observer is not None
    observers = {}
    for name, layer in layers.items():
        observer = Observer.load_from_registry(scheme.observer, base_name="input", args=scheme)
        # PyTorch would replace the layer's inputs by what a hook returns, unless that is None.
        layer.register_forward_pre_hook(
            lambda _, inputs, observer=observer: observer(inputs[0]) and None
        )
        observers[name] = observer
    return observers


def input_scales(observers: Mapping[str, Observer]) -> dict[str, torch.Tensor]:
    """Raises CommandError as ``measure_inputs`` does."""
    bad = [name for name, observer in observers.items() if not _saw_inputs(observer)]
    if bad:
        raise CommandError(
            f"calibration gave no finite, non-zero input to {few(bad)}. Give more or other prompts "
            "(--calibration, --samples), or check that the model answers at all."
        )
    return {name: _scale(observer) for name, observer in observers.items()}


def _saw_inputs(observer: Observer) -> bool:
    if not observer.has_statistics:
        return False
    largest = torch.maximum(observer.max_vals.abs().max(), observer.min_vals.abs().max())
    return bool(largest.isfinite()) and float(largest) > 0


def _scale(observer: Observer) -> torch.Tensor:
    scale = observer.get_global_scale()
    assert scale is not None, "only formats with a static global scale are calibrated"
    return scale.float().reshape(1).cpu()


def split_experts(model: PreTrainedModel) -> None:
    """Give every expert linear layers of its own, which an observer can be put on."""
    for layer in model.model.layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            kind = LinearExperts2D.get_linear_experts_cls(type(experts))
            layer.mlp.experts = kind.from_experts_module(experts, model.config)
