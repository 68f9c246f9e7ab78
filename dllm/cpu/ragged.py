"""Adjacent spans of different lengths, which every batch is: whose they are and how long."""

from collections.abc import Callable

import numpy as np

Kernel = Callable[..., None]  # what replaces a Triton kernel: the arguments of the launch, no grid


def spread(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Name the row and the offset in its span of every element of adjacent spans.

    starts: [rows + 1], span i being [starts[i], starts[i + 1]).
    Returns (rows, offsets), both [starts[-1] - starts[0]] int64.
    """
    rows = np.arange(len(starts) - 1).repeat(lengths(starts))
    return rows, np.arange(starts[0], starts[-1]) - starts[rows]


def lengths(starts: np.ndarray) -> np.ndarray:
    """How long each of adjacent spans is; np.diff, which takes a multiple of the time."""
    return starts[1:] - starts[:-1]
