"""Copies from the host to a GPU that the host does not wait for.

A copy is asynchronous only from pinned memory. From other memory the driver first copies into
pinned memory of its own, and may wait for earlier copies to leave it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """A numpy array, or what makes one, on the device; does not wait for it.

    PyTorch keeps the pinned memory until the copy is done, and uses it again for later ones. On a
    CPU the tensor shares the array's memory.
    """
    on_host = torch.from_numpy(np.asarray(values))
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Several arrays as int64 tensors of their shapes, in one copy.

    Each begins at a multiple of 16 bytes: compiled code copies others once more.
    """
    ends = np.cumsum([array.size + array.size % 2 for array in arrays])
    together = np.zeros(ends[-1], np.int64)
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        together[start : start + array.size] = array.reshape(-1)
    sent = to_device(together, device)
    return [
        sent[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
