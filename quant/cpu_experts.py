"""Quantized experts of a mixture on a CPU, emulated: vLLM has no CPU kernel for them.

vLLM's own methods create the parameters and load the checkpoint into them. Then the weights are
dequantized once, into the dtype of the activations. Every input is rounded to the format of the
checkpoint and back, so that results are those of a quantized model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts, SharedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe import (  # noqa: E501
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)

from dllm.quant.formats import NVFP4_GROUP, QuantDtype, dequantize_weight, round_trip
from dllm.quant.schemes import Scheme

# vLLM's names of the activation of the gate.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Experts:
    """Gated experts with dequantized weights, whose inputs are rounded as the format says."""

    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden], the rows of gate first
    down: torch.Tensor  # [experts, hidden, intermediate]
    inputs: QuantDtype | None  # of all three projections; None leaves them as they are
    gate_up_divisors: torch.Tensor | None  # [experts, 2], global scales of inputs; NVFP4 only
    down_divisors: torch.Tensor | None  # [experts], likewise
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self, tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over each token's experts: ``[tokens, hidden]``, summed in fp32.

        ``topk_weights``, ``topk_ids``: ``[tokens, k]``; an id of -1 (another rank's) adds nothing.
        """
        total = torch.zeros(tokens.shape, dtype=torch.float32)
        for expert in range(len(self.gate_up)):
            rows, choice = (topk_ids == expert).nonzero(as_tuple=True)
            if len(rows):
                output = self._expert(expert, tokens[rows]).float()
                total.index_add_(0, rows, output * topk_weights[rows, choice, None].float())
        return total.to(tokens.dtype)

    def _expert(self, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        """One expert's output, ``[tokens, hidden]``."""
        gate, up = (
            F.linear(self._round_trip(tokens, self.gate_up_divisors, (expert, half)), weight)
            for half, weight in enumerate(self.gate_up[expert].chunk(2))
        )
        hidden = self.activation(gate) * up
        hidden = self._round_trip(hidden, self.down_divisors, (expert,))
        return F.linear(hidden, self.down[expert])

    def _round_trip(
        self, values: torch.Tensor, divisors: torch.Tensor | None, index: tuple[int, ...]
    ) -> torch.Tensor:
        return round_trip(values, self.inputs, None if divisors is None else divisors[index])


class EmulatedExperts(CompressedTensorsMoEMethod):
    """vLLM's method for experts, emulated. Subclasses name this class first and vLLM's method of
    their format second, which creates and loads the parameters. vLLM's ``__init__`` is not called:
    it looks for a kernel and fails on a CPU.
    """

    def __init__(self, scheme: Scheme, weights: QuantizationArgs, moe: FusedMoEConfig) -> None:
        CompressedTensorsMoEMethod.__init__(self, moe)
        self.scheme = scheme
        # What vLLM's methods read when they create the parameters.
        self.weight_quant = weights
        self.weight_block_size, self.block_quant, self.static_input_scales = None, False, False
        self.group_size = NVFP4_GROUP

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # vLLM's names: w13 holds gate and up, one above the other, and w2 holds down.
        w13, w2 = _take_parameters(layer, "w13_"), _take_parameters(layer, "w2_")
        # Gate and up have global scales of their own, so they are taken apart: [experts, 2, rows,
        # columns].
        w13 = {
            suffix: tensor.unflatten(1, (2, -1)) if tensor.ndim == 3 else tensor
            for suffix, tensor in w13.items()
        }
        quant_dtype = self.scheme.weights
        has_divisors = self.scheme.inputs == "nvfp4"
        layer.experts = Experts(
            gate_up=dequantize_weight(w13, quant_dtype).flatten(1, 2).to(layer.params_dtype),
            down=dequantize_weight(w2, quant_dtype).to(layer.params_dtype),
            inputs=self.scheme.inputs,
            gate_up_divisors=w13["input_global_scale"] if has_divisors else None,
            down_divisors=w2["input_global_scale"] if has_divisors else None,
            activation=ACTIVATIONS[layer.activation.value],
        )

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """There is no kernel to configure."""
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum over each token's experts that this rank holds, ``[tokens, hidden]``."""
        if layer.expert_map is not None:  # from the model's numbers of experts to this rank's
            topk_ids = layer.expert_map[topk_ids.long()]
        return run_experts(x, topk_weights, topk_ids, layer.layer_name)


@torch.library.custom_op("dllm::emulated_experts", mutates_args=())
def run_experts(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """``[tokens, hidden]``, summed over each token's experts. One operation for torch.compile: how
    many tokens an expert gets depends on values. The layer is found by its name, as in vLLM's own.
    """
    runner = get_forward_context().no_compile_layers[layer_name]
    experts: Experts = runner.routed_experts.experts
    return experts(tokens, topk_weights, topk_ids)


@run_experts.register_fake
def _(
    tokens: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    return tokens.new_empty(tokens.shape)


def _take_parameters(layer: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    parameters = dict(layer.named_parameters(recurse=False))
    names = [name for name in parameters if name.startswith(prefix)]
    for name in names:
        delattr(layer, name)
    return {name.removeprefix(prefix): parameters[name].data for name in names}


class EmulatedFp8Experts(EmulatedExperts, CompressedTensorsW8A8Fp8MoEMethod):
    """FP8 weights with a scale per channel, FP8 inputs with a scale per token."""


class EmulatedInt8Experts(EmulatedExperts, CompressedTensorsW8A8Int8MoEMethod):
    """INT8 weights with a scale per channel, INT8 inputs with a scale per token."""


class EmulatedNvfp4Experts(EmulatedExperts, CompressedTensorsW4A4Nvfp4MoEMethod):
    """NVFP4 weights, and NVFP4 or unquantized inputs."""


EXPERT_METHODS: dict[QuantDtype, type[EmulatedExperts]] = {
    "fp8": EmulatedFp8Experts,
    "int8": EmulatedInt8Experts,
    "nvfp4": EmulatedNvfp4Experts,
}
