"""Serving a quantized (compressed-tensors) checkpoint on a CPU.

vLLM has CPU kernels for FP8 and INT8 linear layers, and they are used where they are right
(``Int8Linear``). It has none for quantized experts and NVFP4 linear layers: those are emulated
here, that is, their weights are dequantized when they are loaded and their inputs are rounded as
the format says. ``dllm.models.quantized`` puts this configuration in the place of
vLLM's, for our models alone.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW8A8Int8,
)

from dllm.quant.cpu_experts import EXPERT_METHODS
from dllm.quant.formats import (
    NVFP4_GROUP,
    QuantDtype,
    dequantize_nvfp4,
    round_trip,
    unpack_fp4,
)
from dllm.quant.schemes import Plan, parse_plan


class EmulatingConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors configuration, with emulation of what a CPU has no kernel for."""

    plan: Plan

    @classmethod
    def from_config(cls, config: dict[str, object]) -> "EmulatingConfig":
        """Raises ValueError for a scheme that neither vLLM nor the emulation serves."""
        made = super().from_config(config)
        assert isinstance(made, EmulatingConfig)
        made.plan = parse_plan(config)
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Experts get an emulation; for linear layers vLLM calls ``_get_scheme_from_parts``."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        # vLLM's: lets get_scheme_dict below find experts under the target "Linear".
        self._add_fused_moe_to_target_scheme_map()
        names = [f"{prefix}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        schemes = {self.plan.scheme_of(name) for name in names}
        if len(schemes) > 1:
            raise ValueError(
                f"{prefix}: gate, up and down projections are quantized in different ways; "
                "experts need one. Quantize the model again with one scheme for them."
            )
        (scheme,) = schemes
        if scheme is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights = self.get_scheme_dict(layer, names[0])["weights"]
        return EXPERT_METHODS[scheme.weights](scheme, weights, layer.moe_config)

    def _get_scheme_from_parts(
        self,
        weight_quant: QuantizationArgs,
        input_quant: QuantizationArgs | None,
        output_quant: QuantizationArgs | None = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> CompressedTensorsScheme:
        if self._is_nvfp4_format(weight_quant):
            return EmulatedNvfp4Linear(use_a16=input_quant is None)
        scheme = super()._get_scheme_from_parts(
            weight_quant, input_quant, output_quant, format, layer_name
        )
        if isinstance(scheme, CompressedTensorsW8A8Int8):
            return Int8Linear(
                scheme.strategy, scheme.is_static_input_scheme, scheme.input_symmetric
            )
        return scheme


class Int8Linear(CompressedTensorsW8A8Int8):
    """vLLM's linear layer with int8 weights and inputs, where its kernels fail by other means.

    With AMX, vLLM's kernel chooses AMX by the shape of the weight alone, which refuses activations
    in fp32: they are given to oneDNN. On an x86 CPU without VNNI, oneDNN adds pairs of products in
    16 bits, which saturate: sums of large weights were off by 15 %. There the layer is emulated.
    """

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        if not adds_in_32_bits(torch.cpu.get_capabilities()):
            weight = (layer.weight.data * layer.weight_scale.data).to(layer.params_dtype)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.kernel.linear_method = self._emulate
        elif layer.params_dtype == torch.float32:
            self.kernel.linear_method = self.kernel._apply_weights_onednn
            self.kernel.process_weights_for_onednn(layer)
        else:
            super().process_weights_after_loading(layer)

    @staticmethod
    def _emulate(
        layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(round_inputs(x, "int8", None), layer.weight, bias)


def adds_in_32_bits(capabilities: Mapping[str, bool | int | str]) -> bool:
    """Whether a CPU (``torch.cpu.get_capabilities``) adds int8 products without saturation."""
    has_vnni = any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni"))
    return has_vnni or capabilities.get("architecture") != "x86_64"


class EmulatedNvfp4Linear(CompressedTensorsW4A4Fp4):
    """A linear layer, or several fused into one, with NVFP4 weights, emulated.

    Weights are dequantized once, into the dtype of the activations. Inputs are rounded to NVFP4
    and back, or left as they are with ``use_a16``. Each of the fused layers keeps its own global
    scales, where vLLM's kernels take one for all.
    """

    def __init__(self, use_a16: bool) -> None:
        # Not super().__init__(): vLLM's looks for a kernel and fails on a CPU. What its
        # create_weights reads is set here, and `kernel` is this object.
        self.use_a16 = use_a16
        self.group_size = NVFP4_GROUP
        self.kernel = self

    def input_quant_key(self) -> None:
        """None: vLLM passes inputs that are not quantized."""
        return None

    def create_weights(
        self,
        layer: LinearBase,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **kwargs: object,
    ) -> None:
        layer.params_dtype = params_dtype
        super().create_weights(
            layer,
            output_partition_sizes,
            input_size_per_partition,
            params_dtype,
            weight_loader,
            **kwargs,
        )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Dequantize into ``layer.weight``, ``[out, in]``, and delete the quantized tensors."""
        widths = torch.tensor(layer.logical_widths)
        divisors = layer.weight_global_scale.data.repeat_interleave(widths)[:, None]
        codes = unpack_fp4(layer.weight_packed.data)
        weight = dequantize_nvfp4(codes, layer.weight_scale.data, divisors)
        layer.weight = torch.nn.Parameter(weight.to(layer.params_dtype), requires_grad=False)
        layer.parts = [(None, layer.weight)]
        if not self.use_a16:
            layer.parts = self._parts(layer, layer.input_global_scale.data)
            del layer.input_global_scale
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale

    @staticmethod
    def _parts(
        layer: LinearBase, divisors: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(global scale of the inputs, weight) of each fused layer; one entry where they are
        equal.
        """
        if bool((divisors == divisors[0]).all()):
            return [(divisors[0], layer.weight)]
        return list(zip(divisors, layer.weight.split(layer.logical_widths), strict=True))

    def apply_weights(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        outputs = [
            F.linear(x if divisor is None else round_inputs(x, "nvfp4", divisor), weight)
            for divisor, weight in layer.parts
        ]
        output = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        return output if bias is None else output + bias


@torch.library.custom_op("dllm::round_inputs", mutates_args=())
def round_inputs(
    inputs: torch.Tensor, quant_dtype: str, divisor: torch.Tensor | None
) -> torch.Tensor:
    """``round_trip`` of ``[..., n]``: one operation for torch.compile, with the same bits."""
    return round_trip(inputs, cast(QuantDtype, quant_dtype), divisor)


@round_inputs.register_fake
def _(inputs: torch.Tensor, quant_dtype: str, divisor: torch.Tensor | None) -> torch.Tensor:
    return inputs.new_empty(inputs.shape)
