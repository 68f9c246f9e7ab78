"""One denoise step of DiffusionGemma, from logits to the next canvas.

noise -> temperature -> row statistics -> which tokens are kept, and whether to stop (``rule``)
"""

import torch

from dllm.engine.algorithm import Canvases, Column, Denoised
from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.settings.denoising import NO_TOKEN


def step_state(canvas_length: int) -> tuple[Column, ...]:
    """For how many steps each argmax token is the same."""
    return (Column("stable_count", (canvas_length,), torch.int32),)


def denoise(
    logits: torch.Tensor,
    rows: CanvasRows,
    canvases: Canvases,
    settings: GemmaSettings,
    probs_dtype: torch.dtype | None = None,
    filters: RowFilters | None = None,
    cap: float | None = None,
) -> Denoised:
    """One denoise step of R canvases, from their N rows of logits. Writes nothing in place.

    ``probs_dtype``: of ``stats.probs`` in the result; None: no probabilities are returned.
    """
    length, vocab_size = settings.canvas_length, logits.shape[-1]
    parameters = canvases.parameters
    drawn = noise.step_noise(canvases.seeds, rows.starts, canvases.steps_done, length, vocab_size)
    # A request may change its number of steps, but not the model's temperature schedule.
    temperature = rule.temperature(
        canvases.steps_done, settings.max_denoising_steps, parameters["t_min"], parameters["t_max"]
    )[rows.request_of]  # [R] -> [N]
    is_greedy = canvases.is_greedy[rows.request_of]  # [N]
    keys = torch.where(is_greedy[:, None], noise.NO_KEY, drawn.keys[rows.request_of, rows.place])
    stats = row_stats(logits, temperature, keys, probs_dtype, filters, rows.are_read, cap)
    is_free = canvases.chosen == NO_TOKEN
    stats = stats._replace(argmax=torch.where(is_free, stats.argmax, canvases.chosen))
    canvases = canvases.holding_ends(stats.argmax[rows.padded])
    stats = canvases.with_held_tokens(stats, rows)
    stats = stats._replace(sample=torch.where(is_greedy, stats.argmax, stats.sample))
    window = settings.stability_threshold + 1
    return rule.denoise_step(canvases, rows, stats, drawn, temperature, window)
