"""Plain loops of models with masks, in fp32, greedily, by their defaults; prompts in a batch.

After ``generate`` of ML-GSAI/LLaDA, where a step decides the surest token of a block, and
``diffusion_generate`` of Dream, ``alg`` "entropy", where row i is for token i + 1, and a step
decides as many as are expected of it. Both compute prompt and masks in each pass. The authors'
loops go on behind a stop token, these end with its block.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM

from dllm.models import FAMILIES
from dllm.models.llada.shapes import released_name
from dllm.models.unmasking.reference import (
    DecodingRule,
    Generated,
    additive,
    generate_blocks,
    load_model,
    shifted,
)

Generate = Callable[[list[list[int]]], Generated]  # the answers to a batch, whole blocks of them
# Architectures whose tokens all see each other; the backbone of each.
WHOLE_SEQUENCES: dict[str, Any] = {"LLaDAModelLM": LlamaForCausalLM, "DreamModel": Qwen2ForCausalLM}
LLADA_BLOCK = 32  # tokens; an answer of Dream is one block


def plain_loop(path: Path, max_tokens: int) -> tuple[Generate, Collection[int]]:
    """A LLaDA, a Dream, or a model of masked blocks by the rule of a server."""
    fields = json.loads((path / "config.json").read_text())
    if (architecture := fields["architectures"][0]) not in WHOLE_SEQUENCES:
        rule, model = DecodingRule.of_checkpoint(path), load_model(path)
        return lambda prompts: generate_blocks(model, prompts, rule, max_tokens), rule.stop_ids
    config, kind = FAMILIES[architecture].config_class()(**fields), WHOLE_SEQUENCES[architecture]
    model, is_dream = kind(config).float().eval(), kind is Qwen2ForCausalLM
    own = {name if is_dream else released_name(name): name for name in model.state_dict()}
    weights = load_file(path / "model.safetensors")
    model.load_state_dict({own[name]: each for name, each in weights.items()}, False)
    length = min(max_tokens, config.gen_length)
    loop = WholeSequences(model, config.mask_token_id, length, is_dream)
    loop.stops = GenerationConfig.from_pretrained(path).eos_token_id
    return loop.generate, loop.stops


class WholeSequences:
    """Answers of ``length`` tokens, or up to the block that holds one of ``stops``."""

    def __init__(self, model: Any, mask: int, length: int, is_dream: bool) -> None:
        self.model, self.mask, self.length, self.is_dream = model, mask, length, is_dream
        self.stops: Collection[int] = ()

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], block_length: int | None = None, steps: int | None = None
    ) -> Generated:
        """``steps``: of a block. Prompts are padded on the left: all blocks begin at one place."""
        longest, masks = max(map(len, prompts)), [self.mask] * self.length
        size = block_length or (self.length if self.is_dream else min(LLADA_BLOCK, self.length))
        steps = steps or size
        pads = torch.tensor([[longest - len(ids)] for ids in prompts])
        canvas = torch.tensor([[0] * (longest - len(ids)) + ids + masks for ids in prompts])
        place = torch.arange(canvas.shape[1])
        seen = (place >= pads)[:, None].expand(-1, len(place), -1)
        is_open, num_steps, num_blocks = torch.ones(len(prompts)).bool(), 0, 0
        for start in range(longest, canvas.shape[1], size):
            block = canvas[:, start : start + size]
            for step in range(steps):
                p = self.logits(canvas, seen, start, step)[:, start : start + size].softmax(dim=-1)
                is_mask = block == self.mask
                sure, count = self.surest(p, is_mask, start, step, steps)
                taken = sure.masked_fill(~is_mask, -torch.inf).topk(count).indices
                block.scatter_(1, taken, p.argmax(dim=-1).gather(1, taken))
            num_blocks += int(is_open.sum())
            num_steps += int(is_open.sum()) * steps
            is_open &= ~torch.isin(block, torch.tensor([*self.stops])).any(dim=1)
            if not is_open.any():
                break
        return Generated(canvas[:, longest : start + size].tolist(), num_steps, num_blocks)

    def logits(self, canvas: Tensor, seen: Tensor, start: int, step: int) -> Tensor:
        """``[N, L, V]``, each row for its own token, in a step of the block at ``start``."""
        logits = self.model(canvas, attention_mask=additive(seen), use_cache=False).logits
        logits[..., self.mask] = -torch.inf
        return shifted(logits) if self.is_dream else logits

    def surest(
        self, p: Tensor, is_mask: Tensor, start: int, step: int, steps: int
    ) -> tuple[Tensor, int]:
        """How sure the model is of a block's tokens, ``[N, B]``, and how many a step decides."""
        if not self.is_dream:
            return p.amax(dim=-1), p.shape[1] // steps + (step < p.shape[1] % steps)
        count = int(is_mask[0].sum() * share_of(step, steps))
        return -torch.special.entr(p).sum(dim=-1), count


def share_of(step: int, steps: int) -> float:
    """Of the masks that are left, those that Dream's step decides."""
    times = torch.linspace(1, 1e-3, steps + 1)
    return 1.0 if step == steps - 1 else float(1 - times[step + 1] / times[step])
