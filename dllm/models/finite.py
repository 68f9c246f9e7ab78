"""Refuses a checkpoint with values that are not finite: it would emit one token for ever, or noise.

Tensors are looked at as they are read. Later vLLM packs weights, and a packed one hides its values.
"""

from collections.abc import Iterable, Iterator

import torch


def finite(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same names and tensors; those with less than 16 bits are not looked at.

    Raises:
        ValueError: one holds NaN or infinity; the message names it.
    """
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
