"""The decisions of a denoise step: which masks are replaced, which tokens edited, whether to stop.

These are functions of tensors and nothing else. Tensors are padded to `[R, C]`: R canvases, C the
served canvas length. Canvas r uses its first `width[r]` positions; padding is never a mask, is
never edited, and ends no canvas. A row of width 0 has no canvas and never converges.

References: `BlockRefinementScheduler.step` of diffusers 0.42.1 (LLaDA2), `generate.py` of
JetAstra/SDAR and, for `entropy_bounded`, JetEngine of the same authors; for `entropy_threshold`,
`generate_multi_block` of hao-ai-lab/d3LLM (arXiv 2601.07568). Three differences:

- The best masks are replaced, never more positions than there are masks. `generate.py` may take
  positions that are no masks, and overwrite the end of a prompt.
- Equal confidences are taken from left to right. `torch.topk` leaves the order open.
- A canvas without editing has converged when its last mask is replaced. diffusers makes one more
  pass, which changes nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dllm.ops.noise import gumbel_from_bits
from dllm.ops.schedule import REVERSE, num_revealed, reverse_share

if TYPE_CHECKING:  # it imports vLLM, and `dllm quantize` reads this module without it
    from dllm.engine.thoughts import Thoughts

Strategy = Literal[
    "low_confidence_static",  # the best k
    "low_confidence_dynamic",  # all above the threshold, at least the best k
    "sequential",  # the first k
    "entropy_bounded",  # those of least entropy, while their sum is below the bound; at least one
    "leftmost",  # another name of "sequential", in reinforcement learning
    "least_entropy",  # the k of least entropy
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
STATIC, DYNAMIC, SEQUENTIAL, ENTROPY, LEFTMOST, LEAST_ENTROPY = range(len(STRATEGIES))
OfWholeSequences = Literal[
    Strategy,
    "topk_margin",  # the k whose token is likelier than the second one by the most
    "random",  # any k
    "origin",  # each mask with the probability of the reverse process
    "entropy_threshold",  # in several sub-blocks, all below the bound, at least one of the first
]
WHOLE_STRATEGIES: tuple[str, ...] = get_args(OfWholeSequences)
MARGIN, RANDOM, ORIGIN, BELOW = range(len(STRATEGIES), len(WHOLE_STRATEGIES))


class Proposal(NamedTuple):
    """What the model says about every position, `[R, C]` each."""

    token: Tensor  # int64: the sampled token, or the most likely one
    is_stop: Tensor  # bool: this token ends the request
    was_stop: Tensor  # bool: the canvas token that entered the model does
    confidence: Tensor  # fp32: its probability
    entropy: Tensor  # fp32, nats: of the distribution that it is from
    sub_block: Tensor | None = None  # int64: a number; sub-blocks are filled in from left to right
    # Of whole sequences: probability of the likeliest token, less that of the second one; fp32.
    margin: Tensor | None = None
    bits: Tensor | None = None  # of the same: random 32-bit words, int64


class Outcome(NamedTuple):
    """What a denoise step has made of R canvases."""

    canvas: Tensor  # [R, C] int64: the input of the next step
    post_steps: Tensor  # [R] int: steps that began without a mask
    converged: Tensor  # [R] bool
    is_decided: Tensor  # [R, C] bool: the position got its token in this step


def masks_to_replace(
    is_mask: Tensor,
    proposal: Proposal,
    count: Tensor,
    parameters: Mapping[str, Tensor],
    share: Tensor | None = None,
) -> Tensor:
    """Which masks get their proposed token: [R, C] bool.

    count: [R] int, how many at least; share: [R], with which probability each of them (``origin``).
    """
    place = torch.arange(is_mask.shape[-1], device=is_mask.device).expand_as(is_mask)
    strategy = parameters.get("strategy", torch.full_like(count, DYNAMIC))[:, None]
    if proposal.sub_block is not None:
        is_mask = _open_masks(is_mask, proposal.sub_block, strategy, parameters)
    above = is_mask & (proposal.confidence > parameters["threshold"][:, None])
    score = torch.where(is_mask, _score(proposal, strategy, place, parameters), -torch.inf)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    taken = place < count[:, None]
    if "entropy_bound" in parameters:
        total = proposal.entropy.gather(-1, order).cumsum(dim=-1)
        is_within = (place == 0) | (total < parameters["entropy_bound"][:, None])
        taken = torch.where(strategy == ENTROPY, is_within, taken)
    taken = torch.zeros_like(taken).scatter(-1, order, taken)
    if proposal.bits is not None and share is not None:
        is_drawn = proposal.bits < share[:, None] * 2**32
        taken = torch.where(strategy == ORIGIN, is_drawn, taken)
    if proposal.sub_block is not None and "block_add_threshold" in parameters:
        in_first = in_first_sub_block(is_mask, proposal.sub_block)
        first = torch.where(in_first, score, -torch.inf).argmax(dim=-1, keepdim=True)
        is_below = proposal.entropy < parameters["entropy_bound"][:, None]
        taken |= (strategy == BELOW) & is_below.scatter(-1, first, True)
    is_dynamic = (strategy == DYNAMIC) & (above.sum(dim=-1) >= count)[:, None]
    return is_mask & torch.where(is_dynamic, above, taken)


def _score(
    proposal: Proposal, strategy: Tensor, place: Tensor, parameters: Mapping[str, Tensor]
) -> Tensor:
    """The masks of the highest ones come first: [R, C] fp32. strategy: [R, 1].

    Drawing masks one after the other in proportion to exp(score / alg_temp) is taking those of
    which this and Gumbel noise are the most (Kool et al. 2019, arXiv 1903.06059).
    """
    by_entropy = (strategy == ENTROPY) | (strategy == LEAST_ENTROPY) | (strategy == BELOW)
    score = torch.where(by_entropy, -proposal.entropy, proposal.confidence)
    by_place = (strategy == SEQUENTIAL) | (strategy == LEFTMOST)
    score = torch.where(by_place, -place.to(score.dtype), score)
    if proposal.bits is None or proposal.margin is None:
        return score
    score = torch.where(strategy == MARGIN, proposal.margin, score)
    drawn, spread = gumbel_from_bits(proposal.bits), parameters["alg_temp"][:, None]
    score = torch.where(spread > 0, score / spread + drawn, score)
    return torch.where(strategy == RANDOM, drawn, score)


def _open_masks(
    is_mask: Tensor, sub_block: Tensor, strategy: Tensor, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Which masks a step may replace: [R, C] bool. strategy: [R, 1].

    Those of the first sub-block that has any. Of whole sequences all, or by ``entropy_threshold``
    those of the sub-blocks up to the first one of which too few tokens are decided.
    """
    if "block_add_threshold" not in parameters:
        return in_first_sub_block(is_mask, sub_block)
    size = parameters["sub_block"][:, None]
    masks = torch.zeros_like(sub_block).scatter_add(-1, sub_block, is_mask.long())
    is_slow = size - masks < parameters["block_add_threshold"][:, None] * size
    slow_before = is_slow.long().cumsum(dim=-1) - is_slow.long()
    is_open = slow_before.gather(-1, sub_block) == 0
    return is_mask & ((strategy != BELOW) | is_open)


def in_first_sub_block(is_mask: Tensor, sub_block: Tensor) -> Tensor:
    """Which masks are in the first sub-block that has any: [R, C] bool, as both arguments."""
    last = torch.iinfo(sub_block.dtype).max
    first = torch.where(is_mask, sub_block, last).amin(dim=-1, keepdim=True)
    return is_mask & (sub_block == first)


def unmask_step(
    ids: Tensor,
    proposal: Proposal,
    steps_done: Tensor,
    post_steps: Tensor,
    width: Tensor,
    parameters: Mapping[str, Tensor],
    mask_token_id: int,
    block_size: int | Tensor,
    thoughts: "Thoughts",
) -> Outcome:
    """The whole step: the next canvases, and which have converged. Nothing is written in place.

    Args:
        ids: [R, C] int64, the canvases that entered the model.
        steps_done, post_steps: [R] int, before this step.
        block_size: tokens, or [R] of them, that are spread over the steps.
        parameters: [R] each, of the parameters in the family's settings. Without a strategy it is
            the dynamic one, and without editing nothing is edited.
        thoughts: whose ends are held where their budgets end. An end that was held in vain, because
            the thought has ended in front of it, becomes a mask again. Not in the last step with
            editing, which could turn such places over and over.
    """
    is_valid = torch.arange(ids.shape[-1], device=width.device) < width[:, None]
    is_mask = (ids == mask_token_id) & is_valid
    had_masks = is_mask.any(dim=-1)
    max_steps, is_editing = parameters["max_steps"], torch.zeros_like(had_masks)
    step = steps_done - post_steps
    schedule = parameters["schedule"]
    # `max_steps` is 0 in the empty row of `CanvasRows.of_batch`.
    count, share = num_revealed(step, max_steps.clamp(min=1), block_size, schedule), None
    if "block_length" in parameters:  # of whole sequences, which alone have the reverse process
        is_reverse, left = schedule == REVERSE, is_mask.sum(dim=-1)
        max_steps = torch.where(is_reverse, torch.minimum(max_steps, width), max_steps)
        share = reverse_share(step, max_steps.clamp(min=1))
        # As many as are expected, rounded down.
        count = torch.where(is_reverse, (left * share).floor().to(count.dtype), count)
        share = torch.where(is_reverse, share, count / left.clamp(min=1))
    replaced = masks_to_replace(is_mask, proposal, count, parameters, share)
    is_last = step + 1 >= max_steps
    replaced |= is_mask & is_last[:, None]
    edited = torch.zeros_like(is_mask)
    if "editing" in parameters:
        is_editing = parameters["editing"] > 0
        edited = is_valid & ~is_mask & is_editing[:, None] & (proposal.token != ids)
        edited &= proposal.confidence > parameters["editing_threshold"][:, None]
    decided = replaced | edited
    canvas = torch.where(decided, proposal.token, ids)
    is_stop = torch.where(decided, proposal.is_stop, proposal.was_stop) & is_valid
    blank = torch.where((is_editing & is_last)[:, None], canvas, mask_token_id)
    moved = torch.where(is_valid, thoughts.moved(ids, canvas, blank), canvas)
    is_stop &= moved == canvas
    decided = (decided | (moved != canvas)) & (moved != mask_token_id)
    canvas = moved

    left = is_valid & (canvas == mask_token_id)
    post_steps = post_steps + (~had_masks).to(post_steps.dtype)
    has_edited_enough = ~edited.any(dim=-1)
    if "editing" in parameters:
        has_edited_enough |= post_steps > parameters["max_post_steps"]
    is_settled = torch.where(had_masks, is_last, has_edited_enough)
    is_finished = (is_settled | ~is_editing) & ~left.any(dim=-1)
    has_new_stop = (decided & is_stop).any(dim=-1)
    is_finished |= _has_stopped(is_stop, left) & (has_new_stop | ~is_editing)
    return Outcome(canvas, post_steps, is_finished & (width > 0), decided)


def _has_stopped(is_stop: Tensor, left: Tensor) -> Tensor:
    """Whether no mask is left in front of the first stop token of a canvas: [R] bool.

    What follows that token is never emitted. is_stop, left: [R, C] bool. Source:
    `check_eos_finished` of diffusers, which asks only in steps that put in a stop token. Without
    editing the tokens in front of it cannot change any more, and it makes no difference.
    """
    return (is_stop & (left.long().cumsum(dim=-1) == 0)).any(dim=-1)
