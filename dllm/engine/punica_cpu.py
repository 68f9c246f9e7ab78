"""LoRA adapters on a CPU: vLLM's own gather a matrix for each row, and adapt rows without one.

vLLM's functions take row -1 of the stacked adapters, which is the last adapter, for a row that has
none. In a batch of both, answers without an adapter are then wrong.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class PunicaByRuns(PunicaWrapperCPU):
    """Two matrix products for each run of rows that have the same adapter; others stay as they are.

    For linear layers; heads and embeddings take no adapter (``engine.adapters``).
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add ``scale * x @ A.T @ B.T`` to each slice of ``y``, in place.

        Args:
            y: ``[rows, sum of output_slices]``; x: ``[rows, columns]``.
            lora_a_stacked, lora_b_stacked: of each slice, ``[adapters, 1, rank, columns]`` and
                ``[adapters, 1, slice, rank]``.
        """
        if self.no_lora:
            return
        runs = (one.tolist() for one in self.prefill_metadata[:3])
        stacked = list(zip(lora_a_stacked, lora_b_stacked, strict=True))
        for start, length, adapter in zip(*runs, strict=True):
            if adapter < 0:
                continue
            rows = slice(start, start + length)
            parts = y[rows].split(output_slices, dim=1)
            for part, (a, b) in zip(parts, stacked, strict=True):
                part.add_(x[rows] @ a[adapter, 0].T @ b[adapter, 0].T, alpha=scale)
