"""Parts of diffusers' LLaDA2Pipeline that tests compare with (``bench.local``)."""

from types import SimpleNamespace
from typing import Any

import torch

from bench.local import BlockMasked, diffusers


def scheduler(block_size: int, num_steps: int) -> Any:
    """The pipeline's scheduler, as it is at the start of a block."""
    made = diffusers().BlockRefinementScheduler(block_length=block_size)
    made.set_timesteps(num_steps, block_length=block_size)
    return made


class AllVisible(BlockMasked):
    """The same model, without hiding what the pipeline calls padding."""

    def __init__(self, hiding: BlockMasked) -> None:
        super().__init__(hiding.model, hiding.block_size, hiding.mask_token_id)

    def forward(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> SimpleNamespace:
        """Logits ``[1, length, vocab]``."""
        return super().forward(ids, torch.ones_like(attention_mask), position_ids)
