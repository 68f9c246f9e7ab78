"""Samples as tensors, and the draft blocks behind some of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dllm.drafter.samples import Sample
from dllm.train.network import draft_inputs
from dllm.train.target import Target, TargetEmbeddingsAndHead


class Blocks(NamedTuple):
    """Draft blocks of K positions, A in each of B sequences."""

    ids: Tensor  # [B, A, K], the last token that is known, then masks
    labels: Tensor  # [B, A, K - 1], the tokens that really follow
    exists: Tensor  # [B, A, K - 1] bool; false beyond the end of a sequence


@dataclass(frozen=True)
class Batch:
    """B samples, right-padded: ``tokens`` ``[B, S]``, ``features`` ``[B, S, F]``."""

    samples: Sequence[Sample]
    tokens: Tensor
    features: Tensor

    @property
    def lengths(self) -> Tensor:
        """``[B]``."""
        lengths = [len(sample.tokens) for sample in self.samples]
        return torch.tensor(lengths, device=self.tokens.device)

    @property
    def starts(self) -> Tensor:
        """The place of the first token of each response, ``[B]``."""
        starts = [sample.response_start for sample in self.samples]
        return torch.tensor(starts, device=self.tokens.device)

    def blocks(self, anchors: Tensor, size: int, mask_token_id: int) -> Blocks:
        """Blocks of ``size`` positions, of which ``anchors`` ``[B, A]`` are the first."""
        places = anchors[..., None] + torch.arange(1, size, device=anchors.device)
        tokens = self.tokens[:, None].expand(-1, anchors.shape[1], -1)
        labels = tokens.gather(2, places.clamp(max=self.tokens.shape[1] - 1))
        ids = draft_inputs(self.tokens, anchors, size, mask_token_id)
        return Blocks(ids, labels, places < self.lengths[:, None, None])


def load_batch(
    samples: Sequence[Sample], target: TargetEmbeddingsAndHead, layer_ids: Sequence[int]
) -> Batch:
    """Tokens and hidden states, the latter from disk if they are stored, else recomputed."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.tensor([[*s.tokens, *[0] * (longest - len(s.tokens))] for s in samples])
    tokens = tokens.to(target.device)
    if samples[0].shard is None:
        assert isinstance(target, Target), "hidden states are neither stored nor can be computed"
        return Batch(samples, tokens, target.hidden_states(tokens, layer_ids))
    parts = [sample.hidden() for sample in samples]
    features = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return Batch(samples, tokens, features.to(target.device))
