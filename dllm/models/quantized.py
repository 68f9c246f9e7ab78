"""Checks the weights of a diffusion model, helps vLLM load quantized ones, logs their kernels.

Tensors are looked at as they are read: later vLLM packs weights, and a packed one hides its values.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.quant.checks import checked
from dllm.quant.formats import QuantDtype
from dllm.quant.schemes import Plan, Scheme, parse_model_optimizer, parse_plan

logger = init_logger(LOGGER)

METHOD = "compressed-tensors"
MODEL_OPTIMIZER_NVFP4 = "modelopt_fp4"  # vLLM's name for NVFP4 checkpoints of Model Optimizer

WORDS: dict[QuantDtype, str] = {
    "fp8": "8-bit float",
    "int8": "8-bit integer",
    "nvfp4": "4-bit float",
}
# Parts of the names of kernels that take 16-bit inputs, even if the checkpoint quantizes inputs.
WEIGHT_ONLY_KERNELS = ("marlin", "a16")
# GPUs below this compute capability (x 10) have no 4-bit arithmetic: whatever kernel runs with FP4
# weights, its inputs are 16-bit.
FIRST_CAPABILITY_WITH_FP4 = 100


def emulate_on_cpu(vllm_config: Any) -> None:
    """On a CPU, serve a compressed-tensors checkpoint with ``quant.cpu_config``.

    That emulates the layers for which vLLM has no CPU kernel. It is set in ``vllm_config`` before
    vLLM makes a configuration of its own; other models of this process keep vLLM's. Raises
    ValueError if the checkpoint has a scheme that is not served on a CPU.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.model_config.quantization != METHOD:
        return
    from dllm.quant.cpu_config import EmulatingConfig

    stock = VllmConfig._get_quantization_config(vllm_config.model_config, vllm_config.load_config)
    vllm_config.quant_config = EmulatingConfig.from_config(stock.config)  # type: ignore[union-attr]


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], quant_config: Any, is_whole: bool
) -> tuple[Iterable[tuple[str, torch.Tensor]], Plan | None]:
    """(the same names and tensors, which are checked as they are read; ``plan_of`` the checkpoint).

    Unless ``is_whole`` they may be any part of a checkpoint, and only values are checked. Raises
    ValueError while they are read: a tensor is not finite, or a quantized layer would compute NaN.
    """
    weights = finite(weights)
    plan = plan_of(quant_config)
    if quant_config is None:
        return weights, plan
    return checked(weights, plan if is_whole else None), plan


def finite(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises ValueError for NaN or infinity: the model would emit one token for ever, or noise."""
    for name, tensor in weights:
        if not _is_finite(tensor):
            raise ValueError(
                f"The checkpoint holds values that are NaN or infinite, in {name}. Nothing that "
                "this model writes would mean anything. Download or convert it again."
            )
        yield name, tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.numel() == 0:
        return True
    extremes = torch.stack(tensor.detach().aminmax())  # both are NaN if any value is
    return bool(extremes.isfinite().all())


def plan_of(quant_config: Any) -> Plan | None:
    """Which layer of a checkpoint has which scheme.

    None if the checkpoint is not quantized, or has a scheme that ``quant`` does not know (vLLM on
    CUDA serves more schemes). Then only the values of its scales are checked. Raises ValueError if
    the checkpoint cannot be served.
    """
    if quant_config is None:
        return None
    if quant_config.get_name() == MODEL_OPTIMIZER_NVFP4:
        return parse_model_optimizer(
            quant_config.quant_method, quant_config.group_size, quant_config.exclude_modules
        )
    if quant_config.get_name() != METHOD:
        logger.warning(
            "dllm: of this %s checkpoint only the values of scales are checked",
            quant_config.get_name(),
        )
        return None
    try:
        return parse_plan(quant_config.config)
    except ValueError as error:
        logger.warning("dllm: the layout of this checkpoint is not checked: %s", error)
        return None


def is_unused_scale(parameter: str, plan: Plan | None) -> bool:
    """Whether a checkpoint may leave this parameter out, because no inputs are quantized.

    For Model Optimizer's NVFP4, vLLM's experts have scales of inputs that are not quantized, too.
    """
    if plan is None or not parameter.endswith("_input_scale"):
        return False
    return all(scheme.inputs is None for _, scheme in plan.groups)


def copy_k_proj_entries_to_v_proj(quant_config: Any, layer_types: Sequence[str]) -> None:
    """Give the ``v_proj`` of full-attention layers the same quantization entries as ``k_proj``.

    In a full-attention layer the keys are also the values, so the checkpoint has no ``v_proj``
    there. A checkpoint that lists its layers one by one then lists ``q_proj`` and ``k_proj`` only.
    But vLLM makes one fused layer of q, k and v, and refuses it if not all three are listed.
    """
    full = {index for index, kind in enumerate(layer_types) if kind == "full_attention"}
    if quant_config is not None and quant_config.get_name() == MODEL_OPTIMIZER_NVFP4:
        excluded = quant_config.exclude_modules
        quant_config.exclude_modules = excluded + _missing_v_proj(excluded, full)
    if quant_config is None or quant_config.get_name() != METHOD:
        return
    quant_config.ignore = quant_config.ignore + _missing_v_proj(quant_config.ignore, full)
    targets = quant_config.target_scheme_map
    for name in _missing_v_proj(targets, full):
        targets[name] = targets[name.replace(".v_proj", ".k_proj")]


def _missing_v_proj(names: Iterable[str], layers: Iterable[int]) -> list[str]:
    """Of those ``layers`` whose ``k_proj`` is among ``names``."""
    names = set(names)
    keys = (f"model.layers.{layer}.self_attn.k_proj" for layer in layers)
    return [key.replace(".k_proj", ".v_proj") for key in keys if key in names]


def log_kernels(model: Any, plan: Plan | None) -> None:
    """Log, in one line for the user, which kernels compute the quantized layers."""
    from vllm.platforms import current_platform

    gpu = current_platform.get_device_capability()
    capability = None if gpu is None else gpu.to_int()
    schemes: set[str] = set()
    kinds: dict[str, dict[str, None]] = {}  # of layers, by how they are computed
    for name, layer in model.named_modules():
        found = _kernel_of(layer)
        if found is None or plan is None:
            continue
        layers, kernel = found
        probe = f"{name}.0.up_proj" if layers == "experts" else name
        scheme = plan.scheme_of(probe.replace(".experts.routed_experts.", ".experts."))
        if scheme is not None:
            schemes.add(scheme.name)
            kinds.setdefault(how_computed(scheme, kernel, capability), {})[layers] = None
    if kinds:
        clauses = (f"{' and '.join(layers)}: {text}" for text, layers in kinds.items())
        logger.info("dllm: %s checkpoint; %s", " and ".join(sorted(schemes)), "; ".join(clauses))


def how_computed(scheme: Scheme, kernel: str | None, capability: int | None) -> str:
    """How layers are computed, as "8-bit float weights and inputs, by TritonExperts".

    ``kernel``: vLLM's class that computes; None: emulated (``quant.cpu_config``). ``capability``:
    of the GPU, 90 for Hopper's 9.0; None: a CPU.
    """
    weights = f"{WORDS[scheme.weights]} weights"
    if kernel is None:
        inputs = "as they are" if scheme.inputs is None else "rounded as the format says"
        return (
            f"{weights}, emulated: dequantized when they were loaded, inputs {inputs}; right, but "
            "neither fast nor small"
        )
    if scheme.inputs is None:
        return f"{weights}, 16-bit inputs, by {kernel}"
    has_no_fp4 = capability is not None and capability < FIRST_CAPABILITY_WITH_FP4
    if (scheme.inputs == "nvfp4" and has_no_fp4) or any(
        name in kernel.lower() for name in WEIGHT_ONLY_KERNELS
    ):
        return (
            f"{weights} only, by {kernel}; inputs stay 16-bit on this GPU, although the checkpoint "
            "would quantize them"
        )
    return f"{weights} and inputs, by {kernel}"


def _kernel_of(layer: Any) -> tuple[str, str | None] | None:
    """(kind of layer, name of the kernel, or None if it is ours); None if it is not quantized."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    if isinstance(layer, RoutedExperts):
        method = layer.quant_method
        if hasattr(method, "scheme"):  # quant.cpu_experts
            return "experts", None
        if not type(method).__name__.startswith(("CompressedTensors", "ModelOpt")):
            return None
        return "experts", getattr(method, "experts_cls", type(method)).__name__
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return None
    kernel = getattr(scheme, "fp8_linear", None) or getattr(scheme, "kernel", None) or scheme
    is_ours = kernel is scheme and hasattr(scheme, "kernel")  # quant.cpu_config
    return "linear layers", None if is_ours else type(kernel).__name__
