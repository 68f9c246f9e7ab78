"""New weights for a running model: what does not fit is refused, and a failure leaves a model.

vLLM takes a model's tensors away before it reads the first new one. What is then missing would be
whatever is in memory, and after an error there would be nothing to compute with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open


def refuse_other_checkpoint(new: str, served: str) -> None:
    """Check the headers of a folder's files before its weights are loaded.

    Without effect if either is no folder of safetensors files: vLLM then finds it, or an error.

    Raises:
        ValueError: it has not the tensors of the checkpoint that is served, in their shapes.
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
    found: dict[str, list[int]] = {}
    for file in Path(folder).glob("*.safetensors"):
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
