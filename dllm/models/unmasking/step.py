"""The ``engine.algorithm.DenoisingAlgorithm`` of canvases that start as masks.

One denoise step leads from logits to the next canvas:

    noise -> row statistics at the request's temperature -> which masks are replaced (``rule``)

A greedy request takes the most likely token and its probability at temperature 1, without filters,
as both references do.

Under a grammar all tokens of a step are those of one text, which passes through every token that
stays. So what is on a canvas is always a part of a text that can be written to its end:

    - A token that stays is the only one at its place that the search for the best text may take.
    - Masks in front of the text's end become tokens of the text, as ever. All behind it are masks.
    - With editing, a token that the model would replace by a likelier one does not stay. Its place
      gets what the best text through the others has there.

A sampled request takes the best text of noisy scores, logits / temperature + Gumbel noise: of one
token this is an exact draw, of a whole text nearly one (perturb-and-MAP, Papandreou and Yuille
2011). Tokens that filters exclude are taken only where the grammar allows no other text.
"""

import torch

from dllm.engine.algorithm import Canvases, Column, Denoised, DenoisingAlgorithm
from dllm.engine.canvas_rows import CanvasRows
from dllm.grammar.viterbi import OTHER_THAN_FIXED
from dllm.models.unmasking import rule
from dllm.models.unmasking.settings import UnmaskingSettings
from dllm.ops import noise
from dllm.ops.dispatch import row_stats
from dllm.ops.filters import RowFilters
from dllm.ops.row_stats import RowStats
from dllm.settings.denoising import NO_TOKEN

# More than any sum of noise and scores of a canvas, and little enough to keep their digits.
EXCLUDED = 1e4
ROWS_AT_ONCE = 64  # of noise, which takes several times their memory


class Unmasking(DenoisingAlgorithm):
    decides_for_good = True
    step_state = (Column("post_steps", (), torch.int32),)

    def __init__(self, settings: UnmaskingSettings) -> None:
        self.settings: UnmaskingSettings = settings
        self.begins_causally = settings.begins_causally
        self.is_shifted = settings.is_shifted

    def fresh_canvas(self, seeds: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        shape = (len(seeds), self.settings.canvas_length)
        return torch.full(shape, self.settings.mask_token_id, device=seeds.device)

    def denoise(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        cap: float | None = None,
    ) -> Denoised:
        """The logits of the mask are -inf, so that they are never raw."""
        mask_token_id = self.settings.mask_token_id
        # What is held on the canvas is proposed where it stands, so that editing never changes it.
        canvases = canvases.holding_ends(canvases.ids[rows.padded].long())
        proposal, ids, stats = self.proposed(logits, rows, canvases, filters)
        widths, is_behind = _texts(rows, canvases)
        outcome = rule.unmask_step(
            ids=ids,
            proposal=proposal,
            steps_done=canvases.steps_done,
            post_steps=canvases.step_state["post_steps"],
            width=widths,
            parameters=canvases.parameters,
            mask_token_id=mask_token_id,
            block_size=canvases.parameters.get("block_length", self.settings.canvas_length),
            thoughts=canvases.thoughts,
        )
        # The logprobs of given tokens: of the last step where they are held, else of the first one.
        is_new = (canvases.steps_done == 0)[:, None]
        is_given = (canvases.held != NO_TOKEN) | (is_new & (ids != mask_token_id))
        canvas = torch.where(is_behind, mask_token_id, outcome.canvas)
        is_mask = canvas == mask_token_id
        return Denoised(
            canvas=canvas,
            # Behind a token that ends the request there may be masks left, and nobody reads them.
            argmax_canvas=torch.where(is_mask, proposal.token, canvas),
            accepted=~is_mask,
            converged=outcome.converged,
            steps_done=canvases.steps_done + (rows.widths > 0),
            step_state={"post_steps": outcome.post_steps},
            temperature=canvases.temperature[rows.request_of],
            stats=stats,
            decided=outcome.is_decided | is_given,
        )

    def proposed(
        self, logits: torch.Tensor, rows: CanvasRows, canvases: Canvases, filters: RowFilters | None
    ) -> tuple[rule.Proposal, torch.Tensor, RowStats]:
        """What the model says about every position, the canvases ``[R, C]``, and the statistics.

        The confidence is the token's probability in the distribution that it is drawn from.
        """
        keys = _row_keys(canvases, rows, self.settings.canvas_length)
        temperature = canvases.temperature[rows.request_of]  # [N]
        is_greedy = canvases.is_greedy[rows.request_of, None]
        keys = torch.where(is_greedy, noise.NO_KEY, keys[rows.request_of, rows.place])  # [N, 2]
        stats = row_stats(logits, temperature, keys, None, filters, rows.are_read)
        margin = bits = None
        if "alg_temp" in canvases.parameters:
            margin = _margin(logits, temperature, stats)[rows.padded]
            at = rows.starts, canvases.steps_done, self.settings.canvas_length
            bits = noise.row_keys(canvases.seeds, *at, noise.STREAM_ORDER)[..., 0]
        stats = canvases.with_held_tokens(stats, rows)
        token = stats.sample
        # What a grammar has chosen counts as drawn: only its tokens together are an allowed text.
        is_chosen = canvases.chosen != NO_TOKEN
        token = torch.where(is_chosen, canvases.chosen, token)
        logit = logits.gather(1, token[:, None]).squeeze(1)
        confidence = torch.exp((logit - stats.peak) / temperature - stats.log_z)
        # A token that does not stay changes with its text (`scores_of_texts`).
        is_edited = is_chosen & (canvases.ids != self.settings.mask_token_id)
        confidence = torch.where(is_edited, torch.inf, confidence)
        ids, padded = canvases.ids[rows.padded].long(), token[rows.padded]  # [R, C]
        is_stop, slots = canvases.is_stop, rows.slots[:, None]
        proposal = rule.Proposal(
            token=padded,
            is_stop=is_stop[slots, padded],
            was_stop=is_stop[slots, ids],
            confidence=confidence[rows.padded],
            entropy=stats.entropy[rows.padded],
            sub_block=self._sub_blocks(rows, canvases),
            margin=margin,
            bits=bits,
        )
        return proposal, ids, stats

    def _sub_blocks(self, rows: CanvasRows, canvases: Canvases) -> torch.Tensor | None:
        """Of every position, ``[R, C]`` int64; None in a family that has none.

        Of whole sequences they are counted from the start of the canvas. Otherwise the first token
        of a block is one by itself where logits are shifted: it is decided by the causal pass over
        the context, and the others see it.
        """
        length = canvases.parameters.get("sub_block")
        if length is None:
            return None
        place = torch.arange(self.settings.canvas_length, device=length.device)
        # 0 in the empty row of `CanvasRows.of_batch`.
        length = length.clamp(min=1)[:, None]
        if "block_length" in canvases.parameters:
            return place // length
        place = rows.starts[:, None] % self.settings.block_size + place
        number = place // length
        return torch.where(place == 0, -1, number) if self.is_shifted else number

    def scores_of_texts(
        self,
        logits: torch.Tensor,
        rows: CanvasRows,
        canvases: Canvases,
        filters: RowFilters | None,
        part: slice,
    ) -> torch.Tensor:
        """Logits, noisy if the request is sampled, which leave no choice where a token stays."""
        of, place = rows.request_of[part], rows.place[part]
        temperature, is_greedy = canvases.temperature[of], canvases.is_greedy[of]
        keys = _row_keys(canvases, rows, self.settings.canvas_length)[of, place]
        of_rows = None if filters is None else filters.rows(part)
        none = torch.full_like(keys, noise.NO_KEY)
        stats = row_stats(logits[part], temperature, none, None, of_rows)
        scores = logits[part].clone()
        for low in range(0, len(scores), ROWS_AT_ONCE):
            some = slice(low, low + ROWS_AT_ONCE)
            x, peak = scores[some], stats.peak[some, None]
            noisy = (x - peak) / temperature[some, None] + noise.gumbel(keys[some], x.shape[1])
            noisy = torch.where(x < stats.cutoff[some, None], noisy - EXCLUDED, noisy)
            scores[some] = torch.where(is_greedy[some, None], x, noisy)
        ids = canvases.ids[part].long()
        stays = ids != self.settings.mask_token_id
        if "editing" in canvases.parameters:
            is_sure = torch.exp(-stats.log_z) > canvases.parameters["editing_threshold"][of]
            is_editing = canvases.parameters["editing"][of] > 0
            stays &= ~(is_editing & is_sure & (stats.argmax != ids))
        # A thought may end earlier by itself.
        stays &= ~canvases.thoughts.ends_at(canvases.ids[rows.padded].long())[of, place]
        its_score = torch.where(stays, 0.0, scores.gather(1, ids[:, None])[:, 0])
        scores.masked_fill_(stays[:, None], OTHER_THAN_FIXED)
        return scores.scatter_(1, ids[:, None], its_score[:, None])


def _margin(logits: torch.Tensor, temperature: torch.Tensor, stats: RowStats) -> torch.Tensor:
    """Of the likeliest token's probability over that of the second one, ``[N]`` fp32."""
    is_first = torch.arange(logits.shape[1], device=logits.device) == stats.argmax[:, None]
    second = torch.where(is_first, -torch.inf, logits).amax(dim=1)
    second = torch.where(second < stats.cutoff, -torch.inf, second)
    behind = torch.exp((second - stats.peak) / temperature)
    return torch.exp(-stats.log_z) * (1 - behind)


def _row_keys(canvases: Canvases, rows: CanvasRows, length: int) -> torch.Tensor:
    """Of this step's noise: ``[R, length, 2]`` int64."""
    at = rows.starts, canvases.steps_done
    return noise.row_keys(canvases.seeds, *at, length, noise.STREAM_GUMBEL)


def _texts(rows: CanvasRows, canvases: Canvases) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens of a canvas that its text has, ``[R]`` int64; which are behind it, ``[R, C]`` bool).

    Without a grammar the whole canvas is one text.
    """
    chosen = canvases.chosen[rows.padded] != NO_TOKEN  # [R, C]
    place = torch.arange(chosen.shape[1], device=chosen.device)
    is_valid = place < rows.widths[:, None]
    in_text = torch.where(chosen[:, :1], chosen, True) & is_valid
    return in_text.long().sum(dim=1), is_valid & ~in_text
