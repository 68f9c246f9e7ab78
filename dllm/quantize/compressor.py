"""Quantizing weights with LLM Compressor, a few linear layers at a time and without a model.

LLM Compressor's observers find the scales; compressed-tensors turns weights into codes and packs
them. This module imports LLM Compressor, so it works only in that environment.
"""

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import preset_name_to_scheme
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

from dllm.quant.schemes import Scheme
from dllm.quantize.groups import QuantizeFused, Tensors


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
