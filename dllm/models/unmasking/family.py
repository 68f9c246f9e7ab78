"""The engine's interface, ``engine.family.Family``, for canvases that start as masks."""

import torch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Canvases, Column, Denoised, Family
from dllm.models.unmasking import step
from dllm.models.unmasking.settings import UnmaskingSettings
from dllm.ops.filters import RowFilters


class Unmasking(Family):
    """What the engine asks of an SDAR or a LLaDA2: nothing is looked back at or conditioned."""

    decides_for_good = True
    carried = (Column("post_steps", (), torch.int32),)

    def __init__(self, settings: UnmaskingSettings) -> None:
        self.settings: UnmaskingSettings = settings

    def fresh_canvas(self, seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Canvases of masks."""
        shape = (len(seeds), self.settings.canvas_length)
        return torch.full(shape, self.settings.mask_token_id, device=seeds.device)

    def denoise(
        self, logits: torch.Tensor, rows: CanvasRows, canvases: Canvases, filters: RowFilters | None
    ) -> Denoised:
        """The denoise step: ``step.denoise``."""
        return step.denoise(logits, rows, canvases, self.settings, filters)
