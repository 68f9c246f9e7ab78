"""The drafter's context: keys and values of all layers, from the target's hidden states.

One projection turns hidden states into keys and values of every drafter layer, stored in the
drafter's pages of the KV cache. No layer is run over context tokens. vLLM's ``DFlashQwen3Model``
does that.

While nothing is drafted, hidden states are only copied (``DeferredContext``), and projected in one
product when drafting starts again, or when many tokens have collected.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dllm.drafter.step import TargetStep

NO_SLOT = -1  # cache slot of a token that is not stored: a rejected draft, or padding
# Tokens that are kept at most. One product over so many tokens costs little beside the steps that
# computed them, and is small enough to run at once.
MAX_DEFERRED = 1024


class Context(NamedTuple):
    features: torch.Tensor  # [tokens, layers * hidden], the target's hidden states
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [groups, tokens], cache slots; NO_SLOT for tokens that are not stored


class DeferredContext:
    """The steps whose context is not stored yet, oldest first; ``len`` counts their tokens."""

    def __init__(self) -> None:
        self._steps: list[Context] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def admits(self, num_tokens: int) -> bool:
        return self._num_tokens + num_tokens <= MAX_DEFERRED

    def append(self, step: TargetStep, slots: torch.Tensor, groups: Sequence[int]) -> None:
        """Copy a step: the next one reuses its buffers. ``slots``: ``[groups, tokens or more]``."""
        num_tokens = step.batch.num_tokens
        # Not by a list of groups as the index: its copy to the device would be waited for.
        kept = torch.stack([slots[group, :num_tokens] for group in groups])
        if step.batch.num_draft_tokens:
            kept.masked_fill_(step.is_rejected(), NO_SLOT)
        positions = step.batch.positions[:num_tokens].clone()
        self._steps.append(Context(step.features(), positions, kept))
        self._num_tokens += num_tokens

    def take(self) -> Context:
        features, positions, slots = zip(*self._steps, strict=True)
        self._steps, self._num_tokens = [], 0
        joined = last_of_each_slot(torch.cat(slots, dim=1))
        # One large step is not copied: memory profiling knows of one copy of it.
        whole = features[0] if len(features) == 1 else torch.cat(features)
        return Context(whole, torch.cat(positions), joined)


def last_of_each_slot(slots: torch.Tensor) -> torch.Tensor:
    """``[groups, tokens]``, oldest first: a slot for its last token, ``NO_SLOT`` for the others.

    The page of a request that has ended may be another's, and a kernel that writes a slot twice in
    one call may leave either there. ``unique`` would wait for the number of slots.
    """
    ascending, places = slots.sort(dim=1, stable=True)  # of equal slots the oldest token first
    is_followed = torch.zeros_like(slots, dtype=torch.bool)
    is_followed[:, :-1] = ascending[:, :-1] == ascending[:, 1:]
    kept = ascending.masked_fill(is_followed, NO_SLOT)
    return torch.empty_like(slots).scatter_(1, places, kept)
