"""Greedy acceptance: how many drafts of each step the target would keep, without serving.

The target's greedy response is known. Behind each of its tokens a block is drafted and compared
with what really follows. Then the steps of a server are replayed: each step begins where the one
before ended. Drafts beyond the end of the response are not counted, neither offered nor accepted.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from dllm.drafter.samples import Sample
from dllm.train.drafter.batch import Batch, load_batch
from dllm.train.drafter.ends import TargetEnds
from dllm.train.drafter.network import DraftNetwork, compare

POSITIONS_AT_ONCE = 8192  # of drafts in a batch
ANCHORS_AT_ONCE = 64  # of a response in one pass


@dataclass
class Acceptance:
    """Sums over the steps of some responses.

    Attributes:
        tokens, steps: tokens emitted, and the steps that took; the first token of a response
            comes from its prompt and counts for neither.
        offered, accepted: ``[K - 1]``: for each k, the steps that had a draft k, and those that
            kept it and all drafts before it.
        loss: sum over responses of the mean negative log-likelihood of their tokens, nats.
        responses: number of responses.
    """

    tokens: int = 0
    steps: int = 0
    loss: float = 0.0
    responses: int = 0
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

    @property
    def mean_loss(self) -> float:
        """Mean loss of the responses, in nats a draft."""
        return self.loss / max(self.responses, 1)

    def add(self, agreeing: Sequence[int], width: int, loss: float = 0.0) -> None:
        """Replay the steps of one response.

        Args:
            agreeing: for each token but the last, how many drafts behind it agree.
            width: drafts in a block.
            loss: mean negative log-likelihood of the response's tokens as drafts, nats.
        """
        self.loss += loss
        self.responses += 1
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
    """All groups together."""
    found = Acceptance()
    for one in groups.values():
        found.tokens += one.tokens
        found.steps += one.steps
        found.loss += one.loss
        found.responses += one.responses
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
    network: DraftNetwork,
    target: TargetEnds,
    samples: Sequence[Sample],
    block: int,
    layer_ids: Sequence[int] | None = None,
) -> dict[str, Acceptance]:
    """Acceptance of each group of samples.

    Args:
        block: positions of a draft block, the last token included.
        layer_ids: layers of the target to feed it with; None: those of its config.
    """
    layers = network.config.target_layer_ids if layer_ids is None else layer_ids
    found: dict[str, Acceptance] = defaultdict(Acceptance)
    for group in _batches([sample for sample in samples if sample.num_anchors], block):
        drafted = draft_all(network, target, load_batch(group, target, layers), block)
        for sample, (agreeing, loss) in zip(group, drafted, strict=True):
            found[sample.group].add(agreeing[: sample.num_anchors], block - 1, loss)
    return dict(found)


def draft_all(
    network: DraftNetwork, target: TargetEnds, batch: Batch, block: int
) -> list[tuple[list[int], float]]:
    """Draft behind every token of every response.

    Returns:
        of each response, how many drafts behind each token agree, and the mean loss in nats.
    """
    most = max(sample.num_anchors for sample in batch.samples)
    every = batch.starts[:, None] + torch.arange(most, device=batch.tokens.device)
    last = (batch.lengths - 2)[:, None]
    dtype = network.fc.weight.dtype
    features, head = batch.features.to(dtype), network.head_of(target.head).to(dtype)
    agreeing: list[Tensor] = []
    losses = counts = torch.zeros(len(batch.samples), device=batch.tokens.device)
    for behind in every.split(ANCHORS_AT_ONCE, 1):
        # Shorter responses repeat their last anchor; drafts behind the repeated ones do not count.
        blocks = batch.blocks(behind.minimum(last), block, network.config.mask_token_id)
        exists = blocks.exists & (behind <= last)[..., None]
        embeds = target.embedding[blocks.ids].to(dtype)
        hidden = network(features, embeds, blocks.anchors)[:, :, 1:]
        labels = network.as_drafted(blocks.labels)
        loss, is_likeliest = compare(hidden[exists], head, labels[exists])
        agrees = torch.zeros_like(exists).masked_scatter(exists, is_likeliest)
        agreeing.append(agrees.int().cumprod(-1).sum(-1))
        losses = losses + torch.zeros_like(exists, dtype=loss.dtype).masked_scatter(
            exists, loss
        ).sum((1, 2))
        counts = counts + exists.sum((1, 2))
    return list(zip(torch.cat(agreeing, 1).tolist(), (losses / counts).tolist(), strict=True))


def _batches(samples: Sequence[Sample], block: int) -> Iterator[list[Sample]]:
    """Batches of samples of similar length, each small enough for one pass."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda one: one.num_anchors):
        # Samples are sorted, and all of a batch are padded to the anchors of its last one.
        is_full = (len(batch) + 1) * sample.num_anchors * block > POSITIONS_AT_ONCE
        if batch and (is_full or sample.num_anchors > 2 * batch[0].num_anchors):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
