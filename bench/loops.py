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
from transformers import GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM

from dllm.models import FAMILIES
from dllm.models.llada.shapes import released_name
from dllm.models.unmasking.reference import (
    DecodingRule,
    Generated,
    additive,
    generate_blocks,
    load_model,
)

Generate = Callable[[list[list[int]]], Generated]  # the answers to a batch, whole blocks of them
# Architectures whose tokens all see each other; the backbone of each.
WHOLE_SEQUENCES: dict[str, Any] = {"LLaDAModelLM": LlamaForCausalLM, "DreamModel": Qwen2ForCausalLM}
LLADA_BLOCK = 32  # tokens; an answer of Dream is one block


def plain_loop(path: Path, max_tokens: int) -> tuple[Generate, Collection[int]]:
    """A LLaDA, a Dream, or a model of masked blocks by the rule of a server."""
    config = json.loads((path / "config.json").read_text())
    if config["architectures"][0] in WHOLE_SEQUENCES:
        loop = WholeSequences(path, config, max_tokens)
        return loop.generate, loop.stops
    rule, model = DecodingRule.of_checkpoint(path), load_model(path)
    return lambda prompts: generate_blocks(model, prompts, rule, max_tokens), rule.stop_ids


class WholeSequences:
    def __init__(self, path: Path, fields: dict[str, Any], max_tokens: int) -> None:
        architecture = fields["architectures"][0]
        config = FAMILIES[architecture].config_class()(**fields)
        self.model = WHOLE_SEQUENCES[architecture](config).float().eval()
        self.is_dream = architecture == "DreamModel"
        own = {name if self.is_dream else released_name(name): name
               for name in self.model.state_dict()}  # fmt: skip
        weights = load_file(path / "model.safetensors")
        self.model.load_state_dict({own[name]: each for name, each in weights.items()}, False)
        self.mask, self.length = config.mask_token_id, min(max_tokens, config.gen_length)
        self.block = self.length if self.is_dream else min(LLADA_BLOCK, self.length)
        self.stops: list[int] = GenerationConfig.from_pretrained(path).eos_token_id

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> Generated:
        """Prompts are padded on the left, so that all blocks begin at the same place."""
        longest, masks = max(map(len, prompts)), [self.mask] * self.length
        pads = torch.tensor([[longest - len(ids)] for ids in prompts])
        canvas = torch.tensor([[0] * (longest - len(ids)) + ids + masks for ids in prompts])
        place = torch.arange(canvas.shape[1])
        seen = additive((place >= pads)[:, None].expand(-1, len(place), -1))
        is_open, num_steps, num_blocks = torch.ones(len(prompts)).bool(), 0, 0
        for start in range(longest, canvas.shape[1], self.block):
            block, at = canvas[:, start : start + self.block], start - int(self.is_dream)
            for step in range(block.shape[1]):
                logits = self.model(canvas, attention_mask=seen, use_cache=False).logits
                self._decide(block, logits[:, at : at + block.shape[1]], step)
            num_blocks += int(is_open.sum())
            num_steps += int(is_open.sum()) * block.shape[1]
            is_open &= ~torch.isin(block, torch.tensor(self.stops)).any(dim=1)
            if not is_open.any():
                break
        return Generated(canvas[:, longest : start + self.block].tolist(), num_steps, num_blocks)

    def _decide(self, block: torch.Tensor, logits: torch.Tensor, step: int) -> None:
        """One step, which writes into ``block`` ``[N, B]``; each row has as many masks."""
        is_mask, size = block == self.mask, block.shape[1]
        logits[..., self.mask] = -torch.inf
        p = logits.softmax(dim=-1)
        count, sure = 1, p.amax(dim=-1)
        if self.is_dream:
            sure = -torch.special.entr(p).sum(dim=-1)
            times = torch.linspace(1, 1e-3, size + 1)
            share = 1 - times[step + 1] / times[step]
            count = int(is_mask[0].sum() * (1 if step == size - 1 else share))
        taken = sure.masked_fill(~is_mask, -torch.inf).topk(count).indices
        block.scatter_(1, taken, p.argmax(dim=-1).gather(1, taken))
