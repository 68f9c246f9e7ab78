"""Writes a quantized checkpoint by LLM Compressor's entry points, file by file, without a model.

``model_free_ptq`` does it for schemes without calibration. ``convert_checkpoint`` does the rest, of
which ``model_free_ptq`` (0.14) lacks:

- static scales of inputs, which it refuses; and `oneshot` knows no canvases to calibrate with
- one global scale for gate and up of an expert: vLLM takes the larger for both
- NVFP4 of attention without v (k = v, in full layers of DiffusionGemma): it looks for it
- experts that stay as they are: it splits what one tensor holds, whatever is ignored

This module imports LLM Compressor, so it works only in that environment.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from llmcompressor import model_free_ptq
from llmcompressor.entrypoints.model_free.lifecycle import (
    initialize_quantized_linear,
    validate_weight_for_quantization,
)
from llmcompressor.modifiers.quantization.calibration import (
    apply_calibration_status,
    freeze_module_quantization,
    initialize_observer,
    observe,
    update_qparams,
)
from llmcompressor.observers.fusion import FusionHandler
from loguru import logger

from dllm.quant.schemes import Scheme
from dllm.quantize.convert import Fused, OneCopy, QuantizeFused, Tensors, keeps_fused_experts
from dllm.quantize.job import Job
from dllm.quantize.linears import linears

logger.disable("compressed_tensors")  # a line for every file


def write(job: Job, source: Path, input_scales: Tensors) -> None:
    if job.scheme.needs_calibration or keeps_fused_experts(job, linears(job.source.config)):
        converter = Fused(job, quantizer(job.scheme, job.device), input_scales)
        convert_checkpoint(source, job.out, converter, device=job.device)
        return
    one_copy = OneCopy(job)
    # It takes every weight for that of a linear layer: embeddings, routers, vision.
    weights = {name.removesuffix(".weight") for name in one_copy.copies if name.endswith(".weight")}
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(job.scheme.preset, ["Linear"])},
        ignore=sorted(weights - {layer.module for layer in job.layers}),
    )
    model_free_ptq(source, job.out, config=config, device=job.device, converter=one_copy)


def quantizer(scheme: Scheme, device: str) -> QuantizeFused:
    """Layers that vLLM fuses into one get one NVFP4 global scale together.

    If theirs differed, vLLM would take the larger for all and read the other weights wrong.
    """
    preset = preset_name_to_scheme(scheme.preset, ["Linear"])

    def quantize(weights: Tensors, input_scale: torch.Tensor | None) -> dict[str, Tensors]:
        # The steps of LLM Compressor's own pipeline, called one by one.
        modules = {}
        for name, weight in weights.items():
            validate_weight_for_quantization(weight, preset, name)
            modules[name] = initialize_quantized_linear(weight.to(device), preset, device)
            initialize_observer(modules[name], "weight")
            apply_calibration_status(modules[name])
        if scheme.weights == "nvfp4":
            FusionHandler.fuse([(module.weight_observer, module) for module in modules.values()])
        observe(modules.values(), base_name="weight")
        update_qparams(modules.values(), base_name="weight")
        parts = {}
        for name, module in modules.items():
            if input_scale is not None:
                module.input_global_scale.data.copy_(input_scale)
            freeze_module_quantization(module)
            compress_module(module)
            parts[name] = {key: value.cpu() for key, value in module.state_dict().items()}
        return parts

    return quantize
