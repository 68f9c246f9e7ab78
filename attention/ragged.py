"""Helpers for batches as vLLM stores them: the rows' spans end to end, each of its own length.

``starts`` says where the spans are: row i has elements [starts[i], starts[i + 1]).
"""

import numpy as np
import torch


def starts_of(lens: np.ndarray) -> np.ndarray:
    """Where spans of these lengths start, and the last one ends: [2, 3] gives [0, 2, 5]."""
    return np.concatenate(([0], np.cumsum(lens)))


def spread(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and offsets: [0, 2, 5] gives [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2], int64."""
    rows = np.arange(len(starts) - 1).repeat(lengths(starts))
    return rows, np.arange(starts[0], starts[-1]) - starts[rows]


def lengths(starts: np.ndarray) -> np.ndarray:
    """np.diff(starts), but several times faster."""
    return starts[1:] - starts[:-1]


def fill(out: torch.Tensor, values: np.ndarray, padding: int | None = None) -> None:
    """Write values, flattened, to the start of a flat tensor, and padding to the rest of it."""
    flat = out.numpy()
    flat[: values.size] = values.reshape(-1)
    if padding is not None:
        flat[values.size :] = padding
