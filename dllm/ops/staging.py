"""Copies from the host to a GPU that the host does not wait for.

A copy is asynchronous only from pinned memory. From other memory the driver first copies into
pinned memory of its own, and may wait for earlier copies to leave it.
"""

from typing import Any

import numpy as np
import torch


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """``values``: a numpy array, or what makes one. On a CPU the tensor shares its memory."""
    on_host = torch.from_numpy(np.asarray(values))
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
