"""A pass of transformers' model over sequences that end with a canvas, without a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.models.unmasking.reference import additive, block_causal


def logits_of(model: Any, ids: list[int], start: int, block_size: int = 1) -> Tensor:
    """Logits ``[L, V]``: causal over blocks, and the tokens from ``start`` on see all of them."""
    return logits_of_all(model, [ids], [start], block_size)[0]


@torch.no_grad()
def logits_of_all(
    model: Any, rows: Sequence[list[int]], starts: Sequence[int], block_size: int = 1
) -> list[Tensor]:
    """The same for many sequences in one pass; nothing sees what pads the shorter ones behind."""
    longest = max(map(len, rows))
    at, lengths = torch.arange(longest), torch.tensor([len(ids) for ids in rows])
    sees_all = at >= torch.tensor(starts)[:, None]
    seen = block_causal(at, block_size) | sees_all[:, :, None]
    mask = additive(seen & (at < lengths[:, None])[:, None])
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    return [of_row[: len(ids)] for of_row, ids in zip(logits, rows, strict=True)]
