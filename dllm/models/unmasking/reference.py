"""Generation with Hugging Face's classes, as simply as possible: what served answers are held to.

A canvas is a block of masks behind the tokens so far; if these end inside a block, the canvas is
the rest of it. In each step the model sees everything up to the end of the canvas, block-causally
and without a cache, and tokens that it is sure of replace masks. The model is any that takes a 4-D
attention mask.

Source: ``LLaDA2Pipeline`` and ``BlockRefinementScheduler.step`` of diffusers 0.42.1 with greedy
sampling and one transfer a step. Without editing this is SDAR's ``low_confidence_dynamic``. Shifted
logits and sub-blocks: arXiv 2509.26328, section 3.3.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from dllm.models import FAMILIES
from dllm.models.llada2 import reference as llada2
from dllm.models.nemotron.shapes import TO_TRANSFORMERS

# By model_type. All others but LLaDA2 are a Qwen3 or, if there are experts, a Qwen3-MoE.
BACKBONES: Mapping[object, type[PreTrainedModel]] = {
    "Fast_dLLM_Qwen": Qwen2ForCausalLM,
    "a2d-qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
    "nemotron_labs_diffusion": Ministral3ForCausalLM,
}


def backbone_of(config: Mapping[str, object]) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Transformers' class and its config; not of LLaDA2."""
    qwen3 = Qwen3MoeForCausalLM if "num_experts" in config else Qwen3ForCausalLM
    kind = BACKBONES.get(config["model_type"], qwen3)
    own = kind.config_class
    return kind, own(**{**config, "model_type": own.model_type})


def load_model(path: Path) -> PreTrainedModel:
    """A checkpoint directory in transformers, in fp32 with eager attention."""
    fields = json.loads((path / "config.json").read_text())
    if fields["model_type"] == "llada2_moe":
        return llada2.load_reference(path)
    kind, config = backbone_of(fields)
    model = kind.from_pretrained(
        path,
        config=config,
        key_mapping=TO_TRANSFORMERS,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    return model.eval()


@dataclass(frozen=True)
class DecodingRule:
    """Which tokens of a canvas a step decides, and when generation stops."""

    block_size: int  # B, tokens; a token sees its own block and those in front of it
    mask_token_id: int  # what a canvas starts as
    stop_ids: tuple[int, ...]
    # A mask is replaced when its token's probability is above this. The mask whose token is the
    # most probable is replaced in any case.
    threshold: float
    # A token is replaced by another whose probability is above this; None: never.
    editing_threshold: float | None = None
    max_post_steps: int = 16  # steps that edit, after the first one without a mask
    canvas_length: int | None = None  # of a canvas that starts with a block; None: B
    # Tokens; masks are replaced in the first sub-block of a block that has any. None: anywhere.
    sub_block: int | None = None
    # A token is decided by the logits of the one in front of it. The first one of a block is
    # decided before the others.
    is_shifted: bool = False

    @classmethod
    def of_checkpoint(cls, path: Path) -> "DecodingRule":
        """What a server uses for this checkpoint and a greedy request, unless told otherwise.

        A block takes at most a step for each of its tokens, and SDAR decodes by
        ``low_confidence_dynamic``: ``max_denoising_steps`` and ``remasking_strategy`` of
        generation_config.json are not read.
        """
        fields = json.loads((path / "config.json").read_text())
        file = path / "generation_config.json"
        generation = json.loads(file.read_text()) if file.exists() else {}
        family = FAMILIES[fields["architectures"][0]]
        config = family.config_class()(**fields)
        values = family.settings_class().defaults | generation
        stops = generation.get("eos_token_id", config.eos_token_id)
        return cls(
            config.block_size or 1,
            config.mask_token_id,
            tuple(stops) if isinstance(stops, list) else (stops,),
            values["threshold"],
            values["editing_threshold"] if values.get("editing") else None,
            values.get("max_post_steps", 0),
            config.canvas_length,
            values.get("small_block_size"),
            family.settings_class().is_shifted,
        )

    def decides(self, is_mask: Tensor, position: Tensor) -> Tensor:
        """Which masks ``[N, L]`` a step may replace, at positions ``[L]``."""
        if self.sub_block is None:
            return is_mask
        place = position % self.block_size
        number = place // self.sub_block
        if self.is_shifted:
            number[place == 0] = -1
        number = torch.where(is_mask, number, self.block_size)
        return is_mask & (number == number.amin(dim=1, keepdim=True))


class Generated(NamedTuple):
    """Answers as token ids; a block was open for ``num_steps / num_blocks`` steps on average.

    What follows the first stop token of an answer means nothing.
    """

    answers: list[list[int]]
    num_steps: int
    num_blocks: int


@torch.no_grad()
def generate_blocks(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], rule: DecodingRule, max_tokens: int
) -> Generated:
    """Greedy answers to all prompts, in one batch.

    An answer ends with the first block that holds a stop token, or that reaches ``max_tokens``.
    """
    sequences = [list(prompt) for prompt in prompts]
    open_rows = list(range(len(prompts)))
    num_blocks = num_steps = 0
    while open_rows:
        canvases, steps = _decode_blocks(model, [sequences[row] for row in open_rows], rule)
        num_blocks += len(open_rows)
        num_steps += steps
        still_open = []
        for row, canvas in zip(open_rows, canvases, strict=True):
            sequences[row] += canvas
            has_stop = any(token in rule.stop_ids for token in canvas)
            if not has_stop and len(sequences[row]) - len(prompts[row]) < max_tokens:
                still_open.append(row)
        open_rows = still_open
    answers = [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]
    return Generated(answers, num_steps, num_blocks)


def _decode_blocks(
    model: PreTrainedModel, contexts: list[list[int]], rule: DecodingRule
) -> tuple[list[list[int]], int]:
    """The next canvas of every context, and the steps that they took together."""
    length = rule.canvas_length or rule.block_size
    starts = torch.tensor([len(ids) for ids in contexts])
    ends = starts + length - starts % rule.block_size
    longest = int(ends.max())
    # Masks stand behind shorter sequences, too: no earlier block sees them.
    ids = torch.tensor([row + [rule.mask_token_id] * (longest - len(row)) for row in contexts])
    position = torch.arange(longest)
    is_canvas = (position >= starts[:, None]) & (position < ends[:, None])
    is_seen = is_canvas[:, :, None] & (position < ends[:, None])[:, None]
    mask = additive(block_causal(position, rule.block_size) | is_seen)
    mask_steps = torch.zeros(len(contexts), dtype=torch.int64)
    post_steps = torch.zeros_like(mask_steps)
    is_open = torch.ones_like(mask_steps, dtype=torch.bool)
    num_steps = 0
    while bool(is_open.any()):
        rows = is_open.nonzero().squeeze(1)
        logits = model(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False).logits
        if rule.is_shifted:
            logits = shifted(logits)
        before = ids[rows]
        may_change = is_canvas[rows]
        if rule.editing_threshold is None:
            is_mask = may_change & (before == rule.mask_token_id)
            may_change = rule.decides(is_mask, position)
        ids[rows], is_edited = decide(logits.float(), before, may_change, rule)
        had_masks = ((before == rule.mask_token_id) & is_canvas[rows]).any(dim=1)
        mask_steps[rows] += had_masks
        post_steps[rows] += ~had_masks
        num_steps += len(rows)
        # A canvas that took a step for each token of a block is not edited further.
        is_done = mask_steps[rows] >= length
        is_done |= (post_steps[rows] > rule.max_post_steps) | (~had_masks & ~is_edited)
        is_open[rows] = ~_is_settled(before, ids[rows], is_canvas[rows], is_done, rule)
    canvases = [row[keep].tolist() for row, keep in zip(ids, is_canvas, strict=True)]
    return canvases, num_steps


def decide(
    logits: Tensor, ids: Tensor, is_canvas: Tensor, rule: DecodingRule
) -> tuple[Tensor, Tensor]:
    """The ids ``[N, L]`` after a step, and which rows were edited. ``logits`` are written."""
    logits[..., rule.mask_token_id] = -torch.inf  # a mask is never an answer
    top, best = logits.softmax(dim=-1).max(dim=-1)
    is_mask = (ids == rule.mask_token_id) & is_canvas
    confidence = torch.where(is_mask, top, -torch.inf)
    surest = confidence.argmax(dim=1, keepdim=True)
    is_replaced = (confidence > rule.threshold).scatter(1, surest, True) & is_mask
    is_edited = torch.zeros_like(is_mask)
    if rule.editing_threshold is not None:
        is_edited = is_canvas & ~is_mask & (top > rule.editing_threshold) & (best != ids)
    return torch.where(is_replaced | is_edited, best, ids), is_edited.any(dim=1)


def _is_settled(
    before: Tensor, after: Tensor, is_canvas: Tensor, is_edited_enough: Tensor, rule: DecodingRule
) -> Tensor:
    """``[N]`` bool; without editing ``is_edited_enough`` does not matter."""
    is_mask = (after == rule.mask_token_id) & is_canvas
    is_stop = torch.isin(after, torch.tensor(rule.stop_ids)) & is_canvas
    # Nothing is open in front of a stop token.
    ends = (is_stop & (is_mask.cumsum(dim=1) == 0)).any(dim=1)
    if rule.editing_threshold is None:
        return ends | ~is_mask.any(dim=1)
    # With editing, diffusers asks only in steps that put a stop token in.
    has_new_stop = (is_stop & (before != after)).any(dim=1)
    return (ends & has_new_stop) | (is_edited_enough & ~is_mask.any(dim=1))


def shifted(logits: Tensor) -> Tensor:
    """Logits ``[N, L, V]`` at the tokens that they predict; the first ones predict nothing."""
    return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)


def block_causal(positions: Tensor, block_size: int) -> Tensor:
    """``[L, L]`` bool: those of their own block and of earlier ones."""
    block = positions // block_size
    return block[None, :] <= block[:, None]


def additive(visible: Tensor) -> Tensor:
    """A mask for Hugging Face's eager attention, ``[N, 1, Q, K]`` fp32, from ``[N, Q, K]`` bool."""
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None]
