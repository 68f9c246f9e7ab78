"""Generation block after block, as simply as possible: what validation and parity tests decode by.

A canvas is a block of MASK behind the tokens so far; if these end inside a block, the canvas is the
rest of it. In each step the model sees everything up to the end of the canvas, block-causally, and
tokens that it is sure of replace MASK. The model is any of Hugging Face's that takes a 4-D mask.

Source: diffusers 0.42, ``LLaDA2Pipeline`` and ``BlockRefinementScheduler.step`` with greedy
sampling, one transfer a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dllm.tasks.tokenizer import TOKEN_ID
from dllm.train.lm.objective import EOS, pad_right
from dllm.train.lm.two_copies import additive, block_causal

MASK = TOKEN_ID["<mask>"]


@dataclass(frozen=True)
class DecodingRule:
    """Which tokens of a canvas a step decides.

    Attributes:
        block_length: B, tokens.
        threshold: a masked token is decided when its probability is above this; at least the most
            probable one is.
        editing_threshold: a token that is decided becomes another when that one's probability is
            above this; None: it stays.
        max_post_steps: further steps at most, once no MASK is left; only with editing.
    """

    block_length: int
    threshold: float
    editing_threshold: float | None = None
    max_post_steps: int = 16


@torch.no_grad()
def generate_blocks(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rule: DecodingRule,
    max_tokens: int,
) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts, and the mean number of steps per block.

    An answer ends with the first block that holds end-of-sequence, or that reaches ``max_tokens``.
    """
    sequences = [list(prompt) for prompt in prompts]
    open_rows = list(range(len(prompts)))
    num_blocks = num_steps = 0
    while open_rows:
        canvases, steps = _decode_blocks(model, [sequences[row] for row in open_rows], rule)
        num_blocks += len(open_rows)
        num_steps += sum(steps)
        for row, canvas in zip(open_rows, canvases, strict=True):
            sequences[row] += canvas
        open_rows = [
            row
            for row, canvas in zip(open_rows, canvases, strict=True)
            if EOS not in canvas and len(sequences[row]) - len(prompts[row]) < max_tokens
        ]
    answers = [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]
    return answers, num_steps / num_blocks


def _decode_blocks(
    model: PreTrainedModel, contexts: list[list[int]], rule: DecodingRule
) -> tuple[list[list[int]], list[int]]:
    """The next canvas of every context, and the steps that it took."""
    length = rule.block_length
    starts = torch.tensor([len(ids) for ids in contexts])
    ends = (starts // length + 1) * length
    ids = pad_right(contexts, length=int(ends.max()))
    position = torch.arange(ids.shape[1])
    is_canvas = (position >= starts[:, None]) & (position < ends[:, None])
    ids = torch.where(is_canvas, MASK, ids)
    mask = additive(block_causal(position, length)[None])
    steps = torch.zeros(len(contexts), dtype=torch.int64)
    post_steps = torch.zeros_like(steps)
    is_open = torch.ones_like(steps, dtype=torch.bool)
    while bool(is_open.any()):
        logits = model(input_ids=ids[is_open], attention_mask=mask, use_cache=False).logits.float()
        logits[..., MASK] = -torch.inf
        had_masks = ((ids == MASK) & is_canvas).any(dim=1)
        post_steps += is_open & ~had_masks
        changed = torch.zeros_like(is_canvas)
        best = ids.clone()
        best[is_open], changed[is_open] = decide(logits, ids[is_open], is_canvas[is_open], rule)
        was_edited = (changed & (ids != MASK)).any(dim=1)
        ids = torch.where(changed, best, ids)
        steps += is_open
        has_masks = ((ids == MASK) & is_canvas).any(dim=1)
        is_settled = ~had_masks & ~was_edited
        if rule.editing_threshold is None:
            is_settled |= ~has_masks
        is_open &= ~is_settled & ((post_steps <= rule.max_post_steps) | had_masks)
    canvases = [row[keep].tolist() for row, keep in zip(ids, is_canvas, strict=True)]
    return canvases, steps.tolist()


def decide(
    logits: Tensor, ids: Tensor, is_canvas: Tensor, rule: DecodingRule
) -> tuple[Tensor, Tensor]:
    """One step: the most probable tokens ``[N, L]``, and where they replace the ids ``[N, L]``.

    Args:
        logits: ``[N, L, V]`` fp32; ids: ``[N, L]``; is_canvas: ``[N, L]`` bool.
    """
    top, best = logits.softmax(dim=-1).max(dim=-1)
    is_mask = (ids == MASK) & is_canvas
    confidence = torch.where(is_mask, top, -torch.inf)
    changes = confidence > rule.threshold
    # At least the most probable one, if any is masked.
    surest = confidence.argmax(dim=1, keepdim=True)
    changes = changes.scatter(1, surest, True) & is_mask
    if rule.editing_threshold is not None:
        is_sure = (top > rule.editing_threshold) & (best != ids)
        changes |= is_canvas & ~is_mask & is_sure
    return best, changes
