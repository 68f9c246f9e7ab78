"""The training loop of a drafter: draw anchors, step, average, measure, log, checkpoint.

Everything random in step i comes from (seed, i), so a run that was stopped and resumed goes on
with the same bits as one that was not.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import Sample
from dllm.train.drafter.acceptance import Acceptance, Batch, load_batch, measure, total
from dllm.train.drafter.network import DraftNetwork, cross_entropy, draft_inputs
from dllm.train.drafter.settings import CalibrateSettings
from dllm.train.drafter.target import Target
from dllm.train.optimizer import make_optimizers, set_learning_rates, update_average
from dllm.train.run_log import append_row, forget_later_rows, save_state

CHECKPOINT = "state.pt"
LOG = "log.csv"


class Progress(NamedTuple):
    """Where a run is, after each step."""

    step: int
    loss: float  # running mean
    length: float | None  # held-out acceptance length of the last measurement


@dataclass
class Calibration:
    """One run in one directory.

    Attributes:
        block: positions of a draft block.
        start_from: initial weights by name, or None to draw them.
        acceptance: of each group, at the last measurement.
        average: the exponential average of the weights.
    """

    settings: CalibrateSettings
    config: DrafterConfig
    block: int
    target: Target
    samples: Sequence[Sample]
    heldout: Sequence[Sample]
    out: Path
    start_from: dict[str, Tensor] | None = None
    step: int = 0
    loss: float = 0.0
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.settings.threads)
        device = self.target.device
        self.network = DraftNetwork(self.config)
        self.network.initialize(self.settings.seed, self.target.head_norm)
        if self.start_from is not None:
            self.network.load_state_dict(self.start_from)
        self.network = self.network.to(device).train()
        self.average = DraftNetwork(self.config).to(device).requires_grad_(False)
        self.average.load_state_dict(self.network.state_dict())
        self.optimizers = make_optimizers(self.network, self.settings)
        self.head = self.target.head.float()
        self.embedding = self.target.embedding.float()
        gamma = self.settings.gamma or self.block / 2
        self.weights = torch.exp(-torch.arange(self.block - 1) / gamma).to(device)
        self.started = time.monotonic()
        self.seconds_before = 0.0

    def run(self, stop_at: int | None = None) -> Iterator[Progress]:
        """Train to the last step (or to ``stop_at``), reporting after each step."""
        settings = self.settings
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        if self.step == 0:
            self._measure()
        while self.step < last:
            loss = self._train_step()
            self.step += 1
            self.loss = loss if self.step == 1 else self.loss + 0.02 * (loss - self.loss)
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._measure()
            if self.step % settings.checkpoint_every == 0 or self.step == last:
                self.save()
            known = total(self.acceptance).length if self.acceptance else None
            yield Progress(self.step, self.loss, known)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier parts included."""
        return self.seconds_before + time.monotonic() - self.started

    def _train_step(self) -> float:
        """One batch, one step of every optimizer, one update of the average."""
        settings = self.settings
        set_learning_rates(self.optimizers, self.step, settings)
        chosen = random.Random(f"{settings.seed} {self.step}").choices(
            self.samples, k=settings.batch_size
        )
        batch = load_batch(chosen, self.target, self.config.target_layer_ids)
        with torch.autocast(self.target.device.type, torch.bfloat16):
            loss = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update_average(self.average, self.network, self.step, settings.ema)
        return loss.item()

    def _loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the drafts behind random anchors, weighted by their position."""
        anchors = self._draw_anchors(batch.samples).to(batch.tokens.device)
        ids = draft_inputs(batch.tokens, anchors, self.block, self.config.mask_token_id)
        hidden = self.network(batch.features.float(), self.embedding[ids], anchors)
        places = anchors[..., None] + torch.arange(1, self.block, device=anchors.device)
        lengths = torch.tensor([len(sample.tokens) for sample in batch.samples]).to(anchors.device)
        exists = places < lengths[:, None, None]
        tokens = batch.tokens[:, None].expand(-1, anchors.shape[1], -1)
        labels = tokens.gather(2, places.clamp(max=batch.tokens.shape[1] - 1))
        losses = cross_entropy(hidden[:, :, 1:][exists], self.head, labels[exists])
        weights = self.weights.expand(exists.shape)[exists]
        return (losses * weights).sum() / weights.sum()

    def _draw_anchors(self, samples: Sequence[Sample]) -> Tensor:
        """``[B, A]`` positions in the responses, each followed by at least one token."""
        settings = self.settings
        noise = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        drawn = torch.rand(len(samples), settings.anchors, generator=noise)
        first = torch.tensor([sample.response_start for sample in samples])
        count = torch.tensor([sample.num_anchors for sample in samples])
        return first[:, None] + (drawn * count[:, None]).long()

    def _measure(self) -> None:
        """Acceptance of the average of the weights on held-out responses; one row of the log."""
        self.acceptance = measure(self.average, self.target, self.heldout, self.block)
        everything = total(self.acceptance)
        by_position = enumerate(everything.by_position, 1)
        row = {
            "step": self.step,
            "seconds": round(self.seconds),
            "loss": round(self.loss, 4),
            "length": round(everything.length, 3),
            **{f"position_{position}": round(rate, 4) for position, rate in by_position},
            **{name: round(one.length, 3) for name, one in sorted(self.acceptance.items())},
        }
        append_row(self.out / LOG, row)

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the one before."""
        state = {
            "step": self.step,
            "loss": self.loss,
            "seconds": self.seconds,
            "acceptance": {name: vars(one) for name, one in self.acceptance.items()},
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        save_state(self.out / CHECKPOINT, state)

    def resume(self) -> None:
        """Go on from the checkpoint of the directory, if it holds one already."""
        path = self.out / CHECKPOINT
        if path.exists():
            state = torch.load(path, weights_only=True, map_location=self.target.device)
            self.step, self.loss = state["step"], state["loss"]
            self.seconds_before = state["seconds"]
            self.acceptance = {name: Acceptance(**one) for name, one in state["acceptance"].items()}
            self.network.load_state_dict(state["network"])
            self.average.load_state_dict(state["average"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        forget_later_rows(self.out / LOG, self.step or -math.inf)  # step 0 is measured again
