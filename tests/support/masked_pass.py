"""A pass of transformers' model over a sequence that ends with a canvas, without a cache."""

from typing import Any

import torch
from torch import Tensor

from dllm.models.unmasking.reference import additive, block_causal


@torch.no_grad()
def logits_of(model: Any, ids: list[int], start: int, block_size: int = 1) -> Tensor:
    """Logits ``[L, V]``: causal over blocks, and the tokens from ``start`` on see all of them."""
    at = torch.arange(len(ids))
    seen = block_causal(at, block_size) | (at >= start)[:, None]
    mask = additive(seen[None])
    return model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
