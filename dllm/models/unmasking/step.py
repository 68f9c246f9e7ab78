"""The engine's interface, ``engine.family.Family``, for canvases that start as masks.

One denoise step leads from logits to the next canvas:

    noise -> row statistics at the request's temperature -> which masks are replaced (``rule``)

A greedy request takes the most likely token and its probability at temperature 1, without filters,
as both references do.
"""

import torch

from dllm.engine.canvas_rows import CanvasRows
from dllm.engine.family import Canvases, Column, Denoised, Family
from dllm.models.unmasking import rule
from dllm.models.unmasking.settings import UnmaskingSettings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.settings.denoising import NO_TOKEN


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
        """The denoise step, as the function of this name."""
        return denoise(logits, rows, canvases, self.settings, filters)


def denoise(
    logits: torch.Tensor,
    rows: CanvasRows,
    canvases: Canvases,
    settings: UnmaskingSettings,
    filters: RowFilters | None = None,
) -> Denoised:
    """One denoise step of R canvases, from their N rows of logits. Writes nothing in place.

    Args:
        logits: ``[N, V]`` fp32, edited; -inf for the mask.
        rows: which rows of logits belong to which canvas.
        canvases: the state before this step.
        settings: of the model; what a request can change is in ``canvases.numbers``.
        filters: top-k, top-p and min-p of each row of logits; None: no filters.
    """
    proposal, ids, stats = propose(logits, rows, canvases, settings, filters)
    outcome = rule.unmask_step(
        ids=ids,
        proposal=proposal,
        steps_done=canvases.steps_done,
        post_steps=canvases.carried["post_steps"],
        width=rows.widths,
        numbers=canvases.numbers,
        mask_token_id=settings.mask_token_id,
        block_size=settings.block_size,
    )
    is_mask = outcome.canvas == settings.mask_token_id
    return Denoised(
        canvas=outcome.canvas,
        fresh=torch.full_like(outcome.canvas, settings.mask_token_id),
        # Behind a token that ends the request there may be masks left, and nobody reads them.
        argmax_canvas=torch.where(is_mask, proposal.token, outcome.canvas),
        accepted=~is_mask,
        converged=outcome.converged,
        steps_done=canvases.steps_done + (rows.widths > 0),
        carried={"post_steps": outcome.post_steps},
        temperature=canvases.temperature[rows.row_of],
        stats=stats,
        decided=outcome.is_decided,
    )


def propose(
    logits: torch.Tensor,
    rows: CanvasRows,
    canvases: Canvases,
    settings: UnmaskingSettings,
    filters: RowFilters | None = None,
) -> tuple[rule.Proposal, torch.Tensor, RowStats]:
    """What the model says about every position, the canvases ``[R, C]``, and the statistics.

    The confidence is the token's probability in the distribution that it is drawn from.
    """
    length = settings.canvas_length
    starts = rows.seq_lens - rows.widths
    keys = noise.row_keys(canvases.seeds, starts, canvases.steps_done, length, noise.STREAM_GUMBEL)
    temperature = canvases.temperature[rows.row_of]  # [N]
    is_greedy = canvases.is_greedy[rows.row_of, None]
    keys = torch.where(is_greedy, noise.NO_KEY, keys[rows.row_of, rows.place])  # [N, 2]
    stats = row_stats(logits, temperature, keys, None, filters)
    token = stats.sample
    # What a grammar has chosen counts as drawn: only its tokens together are an allowed text.
    token = torch.where(canvases.chosen == NO_TOKEN, token, canvases.chosen)
    logit = logits.gather(1, token[:, None]).squeeze(1)
    confidence = torch.exp((logit - stats.peak) / temperature - stats.log_z)
    ids, padded = canvases.ids[rows.padded].long(), token[rows.padded]  # [R, C]
    is_stop, slots = canvases.is_stop, rows.slots[:, None]
    proposal = rule.Proposal(
        token=padded,
        is_stop=is_stop[slots, padded],
        was_stop=is_stop[slots, ids],
        confidence=confidence[rows.padded],
        entropy=stats.entropy[rows.padded],
    )
    return proposal, ids, stats
