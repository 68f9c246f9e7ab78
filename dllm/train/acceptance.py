"""Greedy acceptance: how many drafts of each step the target would keep, without serving.

The target's greedy response is known. Behind each of its tokens a block is drafted and compared
with what really follows. Then the steps of a server are replayed: each step begins where the one
before ended. Drafts beyond the end of the response are not counted, neither offered nor accepted.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from dllm.drafter.samples import Sample
from dllm.train.network import DraftNetwork
from dllm.train.target import Batch, TargetEmbeddingsAndHead, load_batch

ANCHORS_AT_ONCE = 64  # of a response in one pass


@dataclass
class Acceptance:
    # Tokens emitted, and the steps that took; the first token of a response comes from its prompt
    # and counts for neither.
    tokens: int = 0
    steps: int = 0
    # [K - 1]: for each k, the steps that had a draft k, and that kept it and all drafts before it.
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Acceptance length: mean tokens a step, the target's own included; 1 without a step."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def by_position(self) -> list[float]:
        """For k from 1: of the steps that had a draft k, the share that kept it."""
        pairs = zip(self.accepted, self.offered, strict=True)
        return [kept / max(offered, 1) for kept, offered in pairs]

    def add(self, agreeing: Sequence[int], width: int) -> None:
        """``agreeing``: for each token of a response but the last, drafts behind it that agree."""
        if not self.offered:
            self.offered, self.accepted = [0] * width, [0] * width
        at = 0
        while at < len(agreeing):
            left = len(agreeing) - at
            kept = min(agreeing[at], left)
            self.steps += 1
            self.tokens += min(kept + 1, left)
            for position in range(min(width, left)):
                self.offered[position] += 1
                self.accepted[position] += position < kept
            at += kept + 1


def total(groups: dict[str, Acceptance]) -> Acceptance:
    found = Acceptance()
    for one in groups.values():
        found.tokens += one.tokens
        found.steps += one.steps
        for name in ("offered", "accepted"):
            pairs = zip_longest(getattr(found, name), getattr(one, name), fillvalue=0)
            setattr(found, name, [so_far + more for so_far, more in pairs])
    return found


def possible(samples: Sequence[Sample], width: int) -> dict[str, Acceptance]:
    """Acceptance of each group with a drafter that is always right, of that width."""
    found: dict[str, Acceptance] = defaultdict(Acceptance)
    for sample in samples:
        found[sample.group].add([width] * sample.num_anchors, width)
    return dict(found)


@torch.no_grad()
def measure(
    network: DraftNetwork, target: TargetEmbeddingsAndHead, samples: Sequence[Sample], block: int
) -> dict[str, Acceptance]:
    """``block``: positions of a draft block, the last token included."""
    head = network.head_of(target.head).to(network.fc.weight.dtype)
    found: dict[str, Acceptance] = defaultdict(Acceptance)
    for sample in samples:
        if sample.num_anchors:
            batch = load_batch([sample], target, network.config.target_layer_ids)
            agreeing = agreeing_drafts(network, target.embedding, head, batch, block)
            found[sample.group].add(agreeing, block - 1)
    return dict(found)


def agreeing_drafts(
    network: DraftNetwork, embedding: Tensor, head: Tensor, batch: Batch, block: int
) -> list[int]:
    """How many of the K - 1 drafts behind each token of the only response, but the last, agree.

    ``head``, ``embedding``: ``[V, H]``. Drafts beyond the end of the response do not count.
    """
    (sample,) = batch.samples
    first, features = sample.response_start, batch.features.to(head.dtype)
    every = torch.arange(first, first + sample.num_anchors, device=batch.tokens.device)
    agreeing: list[int] = []
    for anchors in every[None].split(ANCHORS_AT_ONCE, 1):
        blocks = batch.blocks(anchors, block, network.config.mask_token_id)
        hidden = network(features, embedding[blocks.ids].to(head.dtype), anchors)[:, :, 1:]
        labels = network.as_drafted(blocks.labels)[blocks.exists]
        agrees = torch.zeros_like(blocks.exists)
        agrees[blocks.exists] = F.linear(hidden[blocks.exists], head).argmax(-1) == labels
        agreeing += agrees[0].int().cumprod(-1).sum(-1).tolist()
    return agreeing
