"""Greedy acceptance: how many drafts of each step the target would keep, without serving.

The target's greedy response is known. Behind each of its tokens a block is drafted and compared
with what really follows. Then the steps of a server are replayed: each step begins where the one
before ended. Drafts beyond the end of the response are not counted, neither offered nor accepted.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from dllm.drafter.samples import Sample
from dllm.train.drafter.ends import TargetEnds
from dllm.train.drafter.network import DraftNetwork, draft_inputs
from dllm.train.drafter.target import Target

ROWS_AT_ONCE = 8192  # draft positions in one pass
ANCHORS_AT_ONCE = 8  # whose logits are in memory together


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

    def merge(self, other: "Acceptance") -> None:
        """Add another one's steps."""
        for name in ("offered", "accepted"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [one + two for one, two in pairs])
        self.tokens += other.tokens
        self.steps += other.steps
        self.loss += other.loss
        self.responses += other.responses


def possible(samples: Sequence[Sample], width: int) -> dict[str, Acceptance]:
    """Acceptance of each group with a drafter that is always right, of that width."""
    found: dict[str, Acceptance] = defaultdict(Acceptance)
    for sample in samples:
        found[sample.group].add([width] * sample.num_anchors, width)
    return dict(found)


def total(groups: dict[str, Acceptance]) -> Acceptance:
    """All groups together."""
    everything = Acceptance()
    for acceptance in groups.values():
        everything.merge(acceptance)
    return everything


@dataclass(frozen=True)
class Batch:
    """Samples as tensors: ``tokens`` ``[B, S]``, ``features`` ``[B, S, F]``, right-padded."""

    samples: Sequence[Sample]
    tokens: Tensor
    features: Tensor


def load_batch(samples: Sequence[Sample], target: TargetEnds, layer_ids: Sequence[int]) -> Batch:
    """Tokens and hidden states, the latter from disk if they are stored, else recomputed."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.tensor([[*s.tokens, *[0] * (longest - len(s.tokens))] for s in samples])
    tokens = tokens.to(target.device)
    if samples[0].shard is None:
        assert isinstance(target, Target), "hidden states are neither stored nor can be computed"
        return Batch(samples, tokens, target.hidden_states(tokens, layer_ids))
    parts = [sample.hidden() for sample in samples]
    features = parts[0].new_zeros(len(parts), longest, parts[0].shape[-1])
    for row, part in zip(features, parts, strict=True):
        row[: len(part)] = part
    return Batch(samples, tokens, features.to(target.device))


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
        batch = load_batch(group, target, layers)
        drafts = draft_all(network, target, batch, block)
        for sample, drafted in zip(group, drafts, strict=True):
            agreeing = drafted.agreeing[: sample.num_anchors]
            found[sample.group].add(agreeing, block - 1, drafted.loss)
    return dict(found)


class Drafted(NamedTuple):
    """Of one response: how many drafts behind each token agree, and the mean loss in nats."""

    agreeing: list[int]
    loss: float


def draft_all(network: DraftNetwork, target: TargetEnds, batch: Batch, block: int) -> list[Drafted]:
    """Draft behind every token of every response."""
    most = max(sample.num_anchors for sample in batch.samples)
    device = batch.tokens.device
    first = torch.tensor([sample.response_start for sample in batch.samples], device=device)
    last = torch.tensor([len(sample.tokens) - 2 for sample in batch.samples], device=device)
    behind = first[:, None] + torch.arange(most, device=device)
    anchors = behind.minimum(last[:, None])  # shorter responses repeat their last anchor
    places = anchors[..., None] + torch.arange(1, block, device=device)
    after = batch.tokens[:, None].expand(-1, most, -1)
    labels = after.gather(2, places.clamp(max=batch.tokens.shape[1] - 1))
    ids = draft_inputs(batch.tokens, anchors, block, network.config.mask_token_id)
    dtype = next(network.parameters()).dtype
    hidden = network(batch.features.to(dtype), target.embedding[ids].to(dtype), anchors)
    head = target.head.to(dtype)
    some = (each.split(ANCHORS_AT_ONCE, 1) for each in (hidden[:, :, 1:], labels))
    parts = [_compare(rows @ head.T, of_rows) for rows, of_rows in zip(*some, strict=True)]
    agrees, losses = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    # Drafts beyond the end of a response, and behind the repeated anchors, do not count.
    exists = (places < last[:, None, None] + 2) & (behind <= last[:, None])[..., None]
    prefixes = (agrees & exists).int().cumprod(-1).sum(-1).tolist()
    means = (losses * exists).sum((1, 2)) / exists.sum((1, 2))
    return [Drafted(*pair) for pair in zip(prefixes, means.tolist(), strict=True)]


def _compare(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the likeliest token is the label, and the label's loss: ``[B, A, K - 1]`` each."""
    losses = logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).neg()
    return logits.argmax(-1) == labels, losses


def _batches(samples: Sequence[Sample], block: int) -> Iterator[list[Sample]]:
    """Batches of samples of similar length, each small enough for one pass."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda one: one.num_anchors):
        # Samples are sorted, and all of a batch are padded to the anchors of its last one.
        is_full = (len(batch) + 1) * sample.num_anchors * block > ROWS_AT_ONCE
        if batch and (is_full or sample.num_anchors > 2 * batch[0].num_anchors):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
