"""Calibration of SDAR and LLaDA2: their reference answers prompts, and observers watch its inputs.

As for DiffusionGemma (``calibrate``) every expert sees every token. The model runs in fp32.

This module imports LLM Compressor, so it works only in that environment.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from dllm.models.llada2.reference import glm4_name
from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from dllm.quantize.calibrate import Calibration, input_scales, observe_inputs


def measure_masked_inputs(
    path: Path,
    modules: Sequence[str],
    preset: str,
    device: str,
    calibration: Calibration,
    on_prompt: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Measure the static scale of each layer's inputs: ``[1]`` fp32, a divisor, by layer name.

    Takes the memory for the whole model in fp32, plus the experts of one layer while they are
    split. Arguments and errors as of ``calibrate.measure_inputs``; a canvas is a block.
    """
    disable_progress_bar()
    with torch.device(device):
        model = load_model(path)
        split_experts(model)
        layers = dict(model.named_modules())
        # Where q, k and v are one layer in the checkpoint, the queries stand for it here.
        own = {module: glm4_name(f"{module}.").removesuffix(".") for module in modules}
        observers = observe_inputs({name: layers[its] for name, its in own.items()}, preset)
        rule = DecodingRule.of_checkpoint(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        for index, messages in enumerate(calibration.prompts):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            with moe_calibration_context():
                generate_blocks(model, [ids], rule, calibration.blocks * rule.block_size)
            on_prompt(index + 1)
    return input_scales(observers)


def split_experts(model: PreTrainedModel) -> None:
    """Give every expert linear layers of its own, which an observer can be put on."""
    for layer in model.model.layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            kind = LinearExperts2D.get_linear_experts_cls(type(experts))
            layer.mlp.experts = kind.from_experts_module(experts, model.config)
