"""Checks while a server loads a quantized checkpoint: one that would compute NaN is refused."""

from collections.abc import Iterable, Iterator

import torch

from dllm.quant.checks import is_scale, layer_problems, scale_problem, unexpected_codes
from dllm.quant.schemes import Plan, Scheme


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], plan: Plan | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a checkpoint's tensors on, and stop at the first that is wrong.

    The tensors of a quantized layer are held back until all have come; then they are checked and
    passed on together.

    Args:
        weights: (name in the checkpoint, tensor).
        plan: which layers are quantized, and how; None checks only the values of scales.

    Raises:
        ValueError: naming every tensor of a layer whose scales are not finite and positive, whose
            tensors are incomplete or contradict each other, or that should not be quantized.
    """
    waiting: dict[str, tuple[Scheme, dict[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        module, _, suffix = name.rpartition(".")
        if is_scale(name):
            _refuse([scale_problem(name, tensor)])
        scheme = plan.scheme_of(module) if plan is not None else None
        if scheme is None and plan is not None and suffix == "weight":
            _refuse([unexpected_codes(name, tensor)])
        if scheme is None or suffix not in scheme.suffixes:
            yield name, tensor
            continue
        _, parts = waiting.setdefault(module, (scheme, {}))
        parts[suffix] = tensor
        if len(parts) == len(scheme.suffixes):
            _refuse(_problems(module, scheme, parts))
            del waiting[module]
            yield from ((f"{module}.{part}", tensor) for part, tensor in parts.items())
    _refuse(
        problem
        for module, (scheme, parts) in waiting.items()
        for problem in _problems(module, scheme, parts)
    )


def _problems(module: str, scheme: Scheme, parts: dict[str, torch.Tensor]) -> list[str]:
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in parts.items()}
    return layer_problems(module, shapes, scheme)


def _refuse(problems: Iterable[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ValueError(
            f"the quantized checkpoint cannot be served: {'; '.join(found)}. Quantize or download "
            "it again; `dllm check-quant` gives a full report."
        )
