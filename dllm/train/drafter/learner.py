"""What a run of ``dllm calibrate`` trains: a drafter on responses of its target."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample
from dllm.train.drafter.acceptance import Acceptance, Batch, load_batch, measure, total
from dllm.train.drafter.ends import TargetEnds
from dllm.train.drafter.network import DraftNetwork, cross_entropy, draft_inputs
from dllm.train.drafter.settings import CalibrateSettings
from dllm.train.run import Learner, choices_of_step, noise_of_step


class DraftLearner(Learner):
    """The drafter of one target.

    Attributes:
        block: positions of a draft block, the last token included.
        samples, heldout: responses to train on, and to measure acceptance on.
        acceptance: of each group of held-out samples, at the last measurement.
    """

    settings: CalibrateSettings
    evaluates_start = True

    def __init__(
        self,
        settings: CalibrateSettings,
        config: DrafterConfig,
        block: int,
        target: TargetEnds,
        samples: Sequence[Sample],
        heldout: Sequence[Sample],
        start_from: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the network; start_from: initial weights by name, or None to draw them."""
        self.settings, self.config, self.block, self.target = settings, config, block, target
        self.samples, self.heldout = samples, heldout
        self.acceptance: dict[str, Acceptance] = {}
        network = DraftNetwork(config)
        network.initialize(settings.seed, target.head_norm)
        if start_from is not None:
            network.load_state_dict(start_from)
        self.model: DraftNetwork = network.to(target.device)
        self.head, self.embedding = target.head.float(), target.embedding.float()
        self.weights = torch.exp(-torch.arange(block - 1) / self.gamma).to(target.device)

    @property
    def gamma(self) -> float:
        """Of the loss: draft k weighs exp(-(k - 1) / gamma)."""
        return self.settings.gamma or self.block / 2

    def loss(self, step: int) -> Tensor:
        """Mean cross-entropy of the drafts behind random anchors, weighted by their position."""
        chosen = choices_of_step(self.settings, step).choices(
            self.samples, k=self.settings.batch_size
        )
        batch = load_batch(chosen, self.target, self.config.target_layer_ids)
        noise = noise_of_step(self.settings, step)
        anchors = self._draw_anchors(chosen, noise).to(self.target.device)
        with torch.autocast(self.target.device.type, torch.bfloat16):
            return self._loss_behind(anchors, batch)

    def _loss_behind(self, anchors: Tensor, batch: Batch) -> Tensor:
        """``anchors``: ``[B, A]``, positions in the batch's sequences."""
        places = anchors[..., None] + torch.arange(1, self.block, device=anchors.device)
        lengths = torch.tensor([len(sample.tokens) for sample in batch.samples]).to(anchors.device)
        exists = places < lengths[:, None, None]
        tokens = batch.tokens[:, None].expand(-1, anchors.shape[1], -1)
        labels = tokens.gather(2, places.clamp(max=batch.tokens.shape[1] - 1))
        ids = draft_inputs(batch.tokens, anchors, self.block, self.config.mask_token_id)
        hidden = self.model(batch.features.float(), self.embedding[ids], anchors)
        losses = cross_entropy(hidden[:, :, 1:][exists], self.head, labels[exists])
        weights = self.weights.expand(exists.shape)[exists]
        return (losses * weights).sum() / weights.sum()

    def _draw_anchors(self, samples: Sequence[Sample], noise: torch.Generator) -> Tensor:
        """``[B, A]`` positions in the responses, each followed by at least one token."""
        drawn = torch.rand(len(samples), self.settings.anchors, generator=noise)
        first = torch.tensor([sample.response_start for sample in samples])
        count = torch.tensor([sample.num_anchors for sample in samples])
        return first[:, None] + (drawn * count[:, None]).long()

    def evaluate(self, average: DraftNetwork) -> dict[str, float]:
        """Acceptance on held-out responses: length, by position, and length of each group.

        No column has the bare name of a group, which a user chooses: it could be another column's.
        """
        self.acceptance = measure(average, self.target, self.heldout, self.block)
        everything = total(self.acceptance)
        by_position = enumerate(everything.by_position, 1)
        groups = sorted(self.acceptance.items())
        return {
            "length": round(everything.length, 3),
            **{f"position_{position}": round(rate, 4) for position, rate in by_position},
            **{f"length_{name}": round(one.length, 3) for name, one in groups},
        }

    def summary(self) -> str:
        """Acceptance length over all held-out responses."""
        length = f"{total(self.acceptance).length:.2f}" if self.acceptance else "-"
        return f"held-out tokens a step {length}"

    def state(self) -> dict[str, Any]:
        """The acceptance, which the model card reports."""
        return {"acceptance": {name: vars(one) for name, one in self.acceptance.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self.acceptance = {name: Acceptance(**one) for name, one in state["acceptance"].items()}
