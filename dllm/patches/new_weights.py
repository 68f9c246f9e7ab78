"""New weights for a running model: what does not fit is refused, and a failure leaves a model.

vLLM takes a model's tensors away before it reads the first new one. What is then missing would be
whatever is in memory, and after an error there would be nothing to compute with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open


def refuse_other_checkpoint(new: str, served: str) -> None:
    """Raises ValueError if a folder has not the tensors of the checkpoint served, in their shapes.

    Without effect if either is no folder of safetensors files: vLLM then finds it, or an error.
    """
    theirs, ours = _shapes(new), _shapes(served)
    if not theirs or not ours:
        return
    wrong = [
        f"{name} is {theirs.get(name, 'missing')}, served is {ours.get(name, 'none')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} others" if len(wrong) > 3 else ""
        raise ValueError(
            f"{new} has not the tensors of the checkpoint that is served, {served}: "
            f"{'; '.join(wrong[:3])}{more}. The weights were not changed."
        )


def _shapes(folder: str) -> dict[str, list[int]]:
    """Of the tensors in the files that vLLM loads: those of the index, or all."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
    from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files

    files = [str(file) for file in Path(folder).glob("*.safetensors")]
    found: dict[str, list[int]] = {}
    for file in filter_duplicate_safetensors_files(files, folder, SAFE_WEIGHTS_INDEX_NAME):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return found


def loading(model: Any, load: Callable[[], None]) -> None:
    """Call ``load``; after an error the tensors that vLLM took away are back.

    Weights that were replaced before the error stay replaced.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        get_layerwise_info,
    )

    try:
        load()
    except BaseException:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        raise


def refuse_new_int8_weights(model: Any) -> None:
    """Raises ValueError for layers that keep packed weights alone: they would use the old ones."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Int8,
    )

    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "scheme", None), CompressedTensorsW8A8Int8):
            raise ValueError(
                f"New weights cannot go into INT8 layers on a CPU ({name}). Start the server "
                "again with them, or serve an unquantized, FP8 or NVFP4 checkpoint."
            )


def pack_new_weights(model: Any) -> None:
    """vLLM packs experts only when a model is loaded first, and a head that shares the embedding's
    weights only if the checkpoint has weights of its own for it.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        method = getattr(method, "old_quant_method", method)  # behind one that takes adapters
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead):
            method.process_weights_after_loading(layer)
