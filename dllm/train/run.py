"""What a run trains, a drafter on responses of its target, and its loop; how far a command is.

Everything random in step i comes from (seed, i), so a run that was stopped and resumed ends with
the same bits as one that was not.
"""

import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllm.drafter.samples import Sample
from dllm.settings.command import CommandError
from dllm.settings.files import whole
from dllm.train.acceptance import Acceptance, measure, total
from dllm.train.export import LOG, MODEL, STATE, Drafter, write_checkpoint, write_log
from dllm.train.network import NEVER, DraftNetwork, count_params, losses
from dllm.train.optimizer import (
    autocast,
    make_optimizers,
    processor,
    set_learning_rates,
    update_average,
)
from dllm.train.settings import DrafterTraining
from dllm.train.target import Batch, TargetEmbeddingsAndHead, load_batch

HEAD_ROWS = 4096  # that the spread of the first logits is measured on
TIMED_CONTEXT = 256  # tokens in front of a block whose pass is timed


class Learner:
    """What drafters, and adapters that draft, have in common; ``Run`` trains their ``model``."""

    settings: DrafterTraining
    samples: Sequence[Sample]
    num_drafts: int
    acceptance: dict[str, Acceptance] = {}  # of held-out groups, at the last measurement

    @property
    def gamma(self) -> float:
        """In the loss, draft k weighs exp(-(k - 1) / gamma)."""
        return self.settings.gamma or (self.num_drafts + 1) / 2

    def _draw_samples(self, step: int) -> tuple[list[Sample], torch.Generator]:
        """Those of a step, and what else is drawn in it."""
        seed = self.settings.seed
        chosen = random.Random(f"{seed} {step}").choices(self.samples, k=self.settings.batch_size)
        return chosen, torch.Generator().manual_seed(seed * 1_000_003 + step)

    def _draw_anchors(self, batch: Batch, noise: torch.Generator) -> Tensor:
        """``[B, A]`` positions in the responses, each followed by at least one token."""
        drawn = torch.rand(len(batch.samples), self.settings.anchors, generator=noise)
        count = torch.tensor([sample.num_anchors for sample in batch.samples])
        chosen = (drawn * count[:, None]).long().to(batch.tokens.device)
        return batch.starts[:, None] + chosen

    def _weighted(self, each: Tensor, there: Tensor) -> Tensor:
        """The mean of the losses ``each`` of the drafts ``there``, ``[B, A, N]`` bool."""
        of_place = torch.exp(-torch.arange(self.num_drafts) / self.gamma).to(each.device)
        weights = of_place.expand(there.shape)[there]
        return (each * weights).sum() / weights.sum().clamp(min=1e-9)  # there may be none

    def _columns(self) -> dict[str, float]:
        """No column has the bare name of a group, which a user chooses: it could be another's."""
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

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know beside the weights: the acceptance, for the model card."""
        return {"acceptance": {name: vars(one) for name, one in self.acceptance.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.acceptance = {name: Acceptance(**one) for name, one in state["acceptance"].items()}


class DraftLearner(Learner):
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
        self.num_drafts = drafter.block - 1
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
        chosen, noise = self._draw_samples(step)
        batch = load_batch(chosen, self.target, self.drafter.read.target_layer_ids)
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
        return self._weighted(each, there)

    def _frequent(self, count: int) -> Tensor:
        """So many tokens, ascending: the most frequent ones of the responses, then the first ones.

        The first tokens of a tokenizer with merges are the most frequent ones of its own text.
        """
        said = [torch.tensor(each.tokens[each.response_start :]) for each in self.samples]
        counts = torch.cat(said).bincount(minlength=len(self.target.head))
        chosen = counts.argsort(descending=True, stable=True)[:count].sort().values
        return chosen.to(self.target.device)

    def evaluate(self, average: DraftNetwork) -> dict[str, float]:
        self.acceptance = measure(average, self.target, self.heldout, self.drafter.block)
        return self._columns()

    def card(self) -> list[str]:
        """How its model card begins."""
        num_params = sum(param.numel() for param in self.model.parameters())
        return [
            f"# A drafter of {num_params / 1e6:.2f}M parameters\n",
            "A block-diffusion (DFlash) drafter in z-lab's format, in bf16: it proposes the next "
            f"{self.num_drafts} tokens of one target in one pass, from the target's hidden states "
            f"behind layers {', '.join(map(str, self.drafter.read.target_layer_ids))}. Embedding "
            "and head are the target's. It changes the target's speed and nothing that it says.\n",
        ]

    def describe(self) -> str:
        num_params, device = count_params(self.drafter.read), self.target.device
        return (
            f"drafter: {num_params / 1e6:.2f}M parameters, {2 * num_params / 1e6:.2f} MB in bf16; "
            f"{self.pass_ms():.1f} ms a pass of {self.drafter.block} positions behind "
            f"{TIMED_CONTEXT} tokens, on {processor(device)}"
        )

    def write(self, average: DraftNetwork, path: Path) -> None:
        write_checkpoint(path, self.drafter.config, average.state_dict())


def draw_revealed(exists: Tensor, share: float, noise: torch.Generator) -> Tensor:
    """``[B, A, K - 1]`` bool, as ``exists``: positions that show the target's token, not the mask.

    ``share`` of the blocks show any, each a uniform number of them, from none to all but one.
    """
    there = exists.cpu()
    ranks = (torch.rand(there.shape, generator=noise) + ~there).argsort(-1).argsort(-1)
    counts = (torch.rand(there.shape[:2], generator=noise) * there.sum(-1)).long()
    is_chosen = torch.rand(there.shape[:2], generator=noise) < share
    return ((ranks < counts[..., None]) & is_chosen[..., None]).to(exists.device)


# --- the loop ------------------------------------------------------------------------------------


class Run:
    """One run in one directory; None: a run without log and checkpoint."""

    def __init__(self, learner: Any, out: Path | None) -> None:
        """``learner``: a ``Learner``."""
        self.learner, self.out = learner, out
        self.settings = learner.settings
        torch.set_num_threads(self.settings.threads)
        self.model: nn.Module = learner.model
        self.average: Any = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizers = make_optimizers(self.model, self.settings)
        self.device = next(self.model.parameters()).device
        self.step, self.loss = 0, 0.0  # loss: running mean over about fifty steps
        self.rows: list[dict[str, float]] = []  # of the log, one for each evaluation
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def run(self, stop_at: int | None = None) -> Iterator[int]:
        """Train to the last step (or to ``stop_at``); yields the number of steps after each."""
        settings = self.settings
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        if self.step == 0 and self.learner.evaluates_start:
            self._evaluate()
        while self.step < last:
            loss = self._train_step()
            self.step += 1
            self.loss = loss if self.step == 1 else self.loss + 0.02 * (loss - self.loss)
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._evaluate()
            if self.step % settings.checkpoint_every == 0 or self.step == last:
                self.save()
            yield self.step

    def _train_step(self) -> float:
        settings = self.settings
        set_learning_rates(self.optimizers, self.step, settings)
        self.model.train()
        # Numbers too small for fp32's exponent change nothing, and CPUs take many times longer for
        # each of them.
        torch.set_flush_denormal(True)
        try:
            loss = self.learner.loss(self.step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            update_average(self.average, self.model, self.step, settings.ema)
        finally:
            torch.set_flush_denormal(False)
        return loss.item()

    def _evaluate(self) -> None:
        columns = self.learner.evaluate(self.average)
        row = {"step": self.step, "seconds": round(self.seconds), "loss": round(self.loss, 4)}
        self.rows.append(row | columns)
        if self.out is not None:
            write_log(self.out / LOG, self.rows)

    def save(self) -> None:
        """What can be served goes to ``OUT/model``. A broken write leaves the state before."""
        if self.out is None:
            return
        state = {
            "step": self.step,
            "loss": self.loss,
            "seconds": self.seconds,
            "rows": self.rows,
            "learner": self.learner.state(),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with whole(self.out / STATE) as part:
            torch.save(state, part)
        self.learner.write(self.average, self.out / MODEL)

    def resume(self) -> None:
        """Go on from the checkpoint of the directory, or from the start if it has none yet."""
        assert self.out is not None, "a run without a directory leaves nothing to resume"
        path = self.out / STATE
        if not path.exists():
            return
        state = torch.load(path, weights_only=True, map_location=self.device)
        if "rows" not in state:
            raise CommandError(f"{path} is no checkpoint of this dllm; give another --out.")
        self.step, self.loss, self.rows = state["step"], state["loss"], state["rows"]
        self._started -= state["seconds"]
        self.learner.load_state(state["learner"])
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Prints how far work of ``total`` parts is, of which ``done`` were done before."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self._begun_with = done
        self._start, self._said = time.monotonic(), -SECONDS_BETWEEN_LINES

    def advance(self, by: int = 1, note: str = "") -> None:
        self.done += by
        seconds = time.monotonic() - self._start
        if self.done >= self.total or seconds - self._said >= SECONDS_BETWEEN_LINES:
            self._said = seconds
            each = seconds / max(1, self.done - self._begun_with)
            left = f"{each:.3g} s each, {each * (self.total - self.done) / 60:.1f} minutes left"
            print(f"{self.what}: {self.done}/{self.total}, {left}  {note}".rstrip(), flush=True)


def train_shown(run: Run) -> None:
    learner = run.learner
    print(learner.describe(), flush=True)
    progress = Progress("train", run.settings.steps, run.step)
    for _ in run.run():
        progress.advance(note=f"loss {run.loss:.3f}  {learner.summary()}")
