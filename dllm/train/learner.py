"""What a run of ``dllm train drafter`` trains: a drafter on responses of its target."""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.drafter.samples import Sample
from dllm.train.acceptance import Acceptance, measure, total
from dllm.train.batch import Batch, load_batch
from dllm.train.export import Drafter, write_checkpoint
from dllm.train.network import NEVER, DraftNetwork, losses
from dllm.train.optimizer import autocast
from dllm.train.settings import DrafterTraining
from dllm.train.target import TargetEmbeddingsAndHead

HEAD_ROWS = 4096  # that the spread of the first logits is measured on
TIMED_CONTEXT = 256  # tokens in front of a block whose pass is timed


class DraftLearner:
    """The drafter of one target: its network, what that is to minimise, and how it is evaluated."""

    def __init__(
        self,
        settings: DrafterTraining,
        drafter: Drafter,
        target: TargetEmbeddingsAndHead,
        samples: Sequence[Sample],
        heldout: Sequence[Sample],
    ) -> None:
        self.settings, self.drafter, self.target = settings, drafter, target
        self.samples, self.heldout = samples, heldout
        self.acceptance: dict[str, Acceptance] = {}  # of held-out groups, at the last measurement
        # Of weights that were only just drawn there is nothing to measure.
        self.evaluates_start = drafter.weights is not None
        network = drafter.network()
        if drafter.weights is None:
            network.initialize(settings.seed)
            network.to(target.device)
            if network.lm_head is not None:
                network.choose_tokens(self._frequent(len(network.lm_head.weight)), target.head)
            head = network.head_of(target.head)
            network.fit_to_head(head[:: max(1, len(head) // HEAD_ROWS)], target.head_norm)
        self.model: DraftNetwork = network.to(target.device)
        self.head, self.embedding = target.head.float(), target.embedding.float()
        self.weights = torch.exp(-torch.arange(drafter.block - 1) / self.gamma).to(target.device)

    @property
    def gamma(self) -> float:
        """In the loss, draft k weighs exp(-(k - 1) / gamma)."""
        return self.settings.gamma or self.drafter.block / 2

    @torch.no_grad()
    def pass_ms(self) -> float:
        """Milliseconds of a pass here, in torch: one block of drafts, the head included."""
        read, device = self.drafter.read, self.target.device
        size = read.target_hidden_size * len(read.target_layer_ids)
        features = torch.zeros(1, TIMED_CONTEXT, size, device=device)
        embeds = self.embedding[read.mask_token_id].expand(1, 1, self.drafter.block, -1)
        anchors = torch.tensor([[TIMED_CONTEXT]], device=device)
        seconds = []
        for _ in range(4):  # the first one warms up
            start = time.perf_counter()
            with autocast(device):
                logits = self.model(features, embeds, anchors) @ self.model.head_of(self.head).T
            logits.argmax(-1).cpu()  # waits for the device
            seconds.append(time.perf_counter() - start)
        return 1e3 * min(seconds[1:])

    def loss(self, step: int) -> Tensor:
        """Mean cross-entropy of the drafts behind random anchors, weighted by their position."""
        seed = self.settings.seed
        chosen = random.Random(f"{seed} {step}").choices(self.samples, k=self.settings.batch_size)
        batch = load_batch(chosen, self.target, self.drafter.read.target_layer_ids)
        noise = torch.Generator().manual_seed(seed * 1_000_003 + step)
        anchors = self._draw_anchors(batch, noise)
        blocks = batch.blocks(anchors, self.drafter.block, self.drafter.read.mask_token_id)
        labels = self.model.as_drafted(blocks.labels)
        there = blocks.exists & (labels != NEVER)
        if self.settings.revealed_share:
            shown = draw_revealed(blocks.exists, self.settings.revealed_share, noise)
            blocks.ids[..., 1:] = torch.where(shown, blocks.labels, blocks.ids[..., 1:])
            there &= ~shown
        with autocast(self.target.device):
            hidden = self.model(batch.features.float(), self.embedding[blocks.ids], anchors)
            each = losses(hidden[:, :, 1:][there], self.model.head_of(self.head), labels[there])
        weights = self.weights.expand(there.shape)[there]
        return (each * weights).sum() / weights.sum()

    def _frequent(self, count: int) -> Tensor:
        """So many tokens, ascending: the most frequent ones of the responses, then the first ones.

        The first tokens of a tokenizer with merges are the most frequent ones of its own text.
        """
        said = [torch.tensor(each.tokens[each.response_start :]) for each in self.samples]
        counts = torch.cat(said).bincount(minlength=len(self.target.head))
        chosen = counts.argsort(descending=True, stable=True)[:count].sort().values
        return chosen.to(self.target.device)

    def _draw_anchors(self, batch: Batch, noise: torch.Generator) -> Tensor:
        """``[B, A]`` positions in the responses, each followed by at least one token."""
        drawn = torch.rand(len(batch.samples), self.settings.anchors, generator=noise)
        count = torch.tensor([sample.num_anchors for sample in batch.samples])
        chosen = (drawn * count[:, None]).long().to(batch.tokens.device)
        return batch.starts[:, None] + chosen

    def evaluate(self, average: DraftNetwork) -> dict[str, float]:
        """No column has the bare name of a group, which a user chooses: it could be another's."""
        self.acceptance = measure(average, self.target, self.heldout, self.drafter.block)
        everything = total(self.acceptance)
        by_position = enumerate(everything.by_position, 1)
        groups = sorted(self.acceptance.items())
        return {
            "length": round(everything.length, 3),
            **{f"position_{position}": round(rate, 4) for position, rate in by_position},
            **{f"length_{name}": round(one.length, 3) for name, one in groups},
        }

    def summary(self) -> str:
        length = f"{total(self.acceptance).length:.2f}" if self.acceptance else "-"
        return f"held-out tokens a step {length}"

    def write(self, average: DraftNetwork, path: Path) -> None:
        write_checkpoint(path, self.drafter.config, average.state_dict())

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know beside the weights: the acceptance, for the model card."""
        return {"acceptance": {name: vars(one) for name, one in self.acceptance.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.acceptance = {name: Acceptance(**one) for name, one in state["acceptance"].items()}


def draw_revealed(exists: Tensor, share: float, noise: torch.Generator) -> Tensor:
    """``[B, A, K - 1]`` bool, as ``exists``: positions that show the target's token, not the mask.

    ``share`` of the blocks show any, each a uniform number of them, from none to all but one.
    """
    there = exists.cpu()
    ranks = (torch.rand(there.shape, generator=noise) + ~there).argsort(-1).argsort(-1)
    counts = (torch.rand(there.shape[:2], generator=noise) * there.sum(-1)).long()
    is_chosen = torch.rand(there.shape[:2], generator=noise) < share
    return ((ranks < counts[..., None]) & is_chosen[..., None]).to(exists.device)
