"""Context that waits: target hidden states of steps that nobody drafted behind.

While nothing is drafted, nobody reads the drafter's pages of these tokens. Their hidden states are
kept and written in one product when somebody drafts again, when a prompt arrives, or when there are
many: an ordinary step then costs next to nothing more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dllm.drafter.context import NO_SLOT

# Tokens that wait: enough that writing them is a small part of the steps that left them, few enough
# to write at once.
MAX_DEFERRED = 256


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

    def admits(self, batch: InputBatch) -> bool:
        """Whether a step that is not drafted behind may leave its context for later.

        Only ordinary decode steps do. Whatever reads a page that was written by another request
        begins with a prompt, and that is the time to write everything that was left.
        """
        return (
            not batch.has_prefill
            and batch.num_draft_tokens == 0
            and self._num_tokens + batch.num_tokens <= MAX_DEFERRED
        )

    def append(
        self,
        batch: InputBatch,
        aux_hidden_states: Sequence[torch.Tensor],
        slots: torch.Tensor,
        groups: Sequence[int],
    ) -> None:
        """Keep copies: the next step overwrites what these are views of.

        Args:
            aux_hidden_states: of the layers that the drafter reads, ``[tokens or more, hidden]``.
            slots: ``[groups, tokens or more]``, of every group of the KV cache.
            groups: those of the drafter.
        """
        num_tokens = batch.num_tokens
        features = torch.cat([hidden[:num_tokens] for hidden in aux_hidden_states], dim=-1)
        positions = batch.positions[:num_tokens].clone()
        self._steps.append(Context(features, positions, slots[groups, :num_tokens]))
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
    is_same = slots[:, :, None] == slots[:, None, :]
    return slots.masked_fill(is_same.triu(1).any(2), NO_SLOT)
