"""Context that waits: target hidden states of steps that nobody drafted behind.

While nothing is drafted, nobody reads the drafter's pages of these tokens. Their hidden states are
kept and written in one product when somebody drafts again, or when there are many: a step that is
not drafted behind, be it of a prompt or not, then costs next to nothing more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dllm.drafter.attention import NO_SLOT
from dllm.drafter.step import TargetStep

# Tokens that wait: enough that writing them is a small part of the steps that left them, few enough
# to write at once.
MAX_DEFERRED = 1024


class Context(NamedTuple):
    """Of some tokens: target features, positions, and cache slots ``[groups, tokens]``."""

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class DeferredContext:
    """The context of steps, oldest first; ``len`` counts their tokens."""

    def __init__(self) -> None:
        self._steps: list[Context] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def admits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens may leave its context for later."""
        return self._num_tokens + num_tokens <= MAX_DEFERRED

    def append(self, step: TargetStep, slots: torch.Tensor, groups: Sequence[int]) -> None:
        """Keep copies: the next step overwrites what these are views of.

        Args:
            slots: ``[groups, tokens or more]``, of every group of the KV cache.
            groups: those of the drafter.
        """
        num_tokens = step.batch.num_tokens
        kept = slots[groups, :num_tokens]  # a list of indices: a copy
        if step.batch.num_draft_tokens:
            kept.masked_fill_(step.is_rejected(), NO_SLOT)
        positions = step.batch.positions[:num_tokens].clone()
        self._steps.append(Context(step.features(), positions, kept))
        self._num_tokens += num_tokens

    def take(self) -> Context:
        """Everything that waits, in order, which then waits no more."""
        features, positions, slots = zip(*self._steps, strict=True)
        self._steps, self._num_tokens = [], 0
        joined = last_of_each_slot(torch.cat(slots, dim=1))
        return Context(torch.cat(features), torch.cat(positions), joined)


def last_of_each_slot(slots: torch.Tensor) -> torch.Tensor:
    """``[groups, tokens]`` with no slot twice: of the tokens with one slot, the last one has it.

    When a request ends, the next step may hand its page to another: then two tokens wait for the
    same place, and a product that writes both leaves it to the kernel whose keys are there.
    """
    places = torch.arange(slots.shape[1], device=slots.device)
    kept = []
    for group in slots:
        distinct, inverse = group.unique(return_inverse=True)
        last = places.new_zeros(len(distinct)).scatter_reduce_(0, inverse, places, "amax")
        kept.append(group.masked_fill(last[inverse] != places, NO_SLOT))
    return torch.stack(kept)
