"""Quantized checkpoints: what a CPU lacks, names that vLLM asks for, what computes."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.logger import init_logger

from dllm import LOGGER

logger = init_logger(LOGGER)

METHOD = "compressed-tensors"


def emulate_on_cpu(vllm_config: Any) -> None:
    """On a CPU, serve compressed-tensors checkpoints of our model with ``quant.cpu_config``.

    Called by the config hook, before vLLM makes its own configuration. Other models of this
    process keep that.

    Raises:
        ValueError: the checkpoint has a scheme that is not served on a CPU.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.model_config.quantization != METHOD:
        return
    from quant.cpu_config import EmulatingConfig

    stock = VllmConfig._get_quantization_config(vllm_config.model_config, vllm_config.load_config)
    vllm_config.quant_config = EmulatingConfig.from_config(stock.config)  # type: ignore[union-attr]


def plan_of(quant_config: Any) -> Any:
    """The ``quant.schemes.Plan`` of a checkpoint; None where it has none that we know.

    On CUDA vLLM serves more schemes than ``quant.schemes`` knows.
    """
    from quant.schemes import parse_plan

    if quant_config is None or quant_config.get_name() != METHOD:
        return None
    try:
        return parse_plan(quant_config.config)
    except ValueError as error:
        logger.warning("dllm: the layout of this checkpoint is not checked: %s", error)
        return None


def name_values_like_keys(quant_config: Any, layer_types: Sequence[str]) -> None:
    """Let what names ``k_proj`` of a full layer name ``v_proj``, which it does not have.

    Its keys are its values, so a checkpoint that spells out its layers names no ``v_proj`` there;
    vLLM fuses the three and refuses if not all of them are named.
    """
    if quant_config is None or quant_config.get_name() != METHOD:
        return
    full = {index for index, kind in enumerate(layer_types) if kind == "full_attention"}
    quant_config.ignore = quant_config.ignore + _values_of(quant_config.ignore, full)
    targets = quant_config.target_scheme_map
    for name in _values_of(targets, full):
        targets[name] = targets[name.replace(".v_proj", ".k_proj")]


def _values_of(names: Iterable[str], layers: Iterable[int]) -> list[str]:
    names = set(names)
    keys = (f"model.layers.{layer}.self_attn.k_proj" for layer in layers)
    return [key.replace(".k_proj", ".v_proj") for key in keys if key in names]


def say_what_computes(model: Any, plan: Any) -> None:
    """Log which kernels the quantized layers of ``model`` have, once, for its users."""
    from vllm.platforms import current_platform

    from quant.report import Choice, in_words

    capability = current_platform.get_device_capability()
    choices: dict[tuple[str, str], Choice] = {}
    for name, layer in model.named_modules():
        found = _kernel_of(layer)
        if found is None or plan is None:
            continue
        layers, kernel = found
        probe = f"{name}.0.up_proj" if layers == "experts" else name
        scheme = plan.scheme_of(probe.replace(".experts.routed_experts.", ".experts."))
        if scheme is not None:
            number = None if capability is None else capability.to_int()
            choice = Choice(layers, scheme, kernel, number)
            choices.setdefault((layers, choice.how()), choice)
    if choices:
        logger.info("dllm: %s", in_words(list(choices.values())))


def _kernel_of(layer: Any) -> tuple[str, str | None] | None:
    """(kind of layer, what computes or None if that is ours); None: not quantized."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    if isinstance(layer, RoutedExperts):
        method = layer.quant_method
        if hasattr(method, "scheme"):  # quant.cpu_experts
            return "experts", None
        if not type(method).__name__.startswith("CompressedTensors"):
            return None
        return "experts", getattr(method, "experts_cls", type(method)).__name__
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return None
    kernel = getattr(scheme, "fp8_linear", None) or getattr(scheme, "kernel", None) or scheme
    is_ours = kernel is scheme and hasattr(scheme, "kernel")  # quant.cpu_config
    return "linear layers", None if is_ours else type(kernel).__name__
