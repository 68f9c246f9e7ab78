"""A pass of transformers' Ministral 3 in which a canvas sees itself whole."""

import torch
from transformers import Ministral3ForCausalLM


@torch.no_grad()
def logits_of(model: Ministral3ForCausalLM, ids: list[int], start: int) -> torch.Tensor:
    """Logits ``[L, V]`` of a sequence whose tokens from ``start`` on are a canvas."""
    visible = torch.ones(len(ids), len(ids)).tril().bool()
    visible[start:] = True
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    return model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
