"""The training loop: draw, step, average, validate, log, checkpoint; the same run when resumed.

Everything random in step i comes from a generator seeded by (seed, i), so a run that was stopped
and resumed goes on with the same bits as one that was not. It runs on torch's default device.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from dllm.tasks.suite import FAMILIES, Question, question, questions
from dllm.train.lm.objective import Objective
from dllm.train.lm.settings import TrainSettings
from dllm.train.optimizer import make_optimizers, set_learning_rates, update_average
from dllm.train.run_log import append_row, forget_later_rows, save_state

CHECKPOINT = "state.pt"
LOG = "log.csv"


class Progress(NamedTuple):
    """Where a run is, after each step."""

    step: int
    loss: float  # running mean
    accuracy: float | None  # of the last validation, over all families


@dataclass
class Trainer:
    """One run in one directory.

    Attributes:
        step: optimizer steps taken.
        errors: validation error of each family, in [0, 1]; 1 before the first validation.
        average: the exponential average of the weights.
        start_from: a checkpoint directory whose weights are the initial ones, or None; no state of
            its optimizers is taken over.
        started_from: digest of these weights, or "" for weights drawn from the seed.
    """

    settings: TrainSettings
    objective: Objective
    out: Path
    start_from: Path | None = None
    step: int = 0
    loss: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.settings.threads)
        families = self.settings.families or tuple(FAMILIES)
        self.errors = dict.fromkeys(families, 1.0)
        self.model = self.objective.build_model()
        self.started_from = ""
        if self.start_from is not None:
            load_start(self.model, self.start_from)
            self.started_from = digest_of(self.start_from)
        self.average = self.objective.build_model().eval()
        self.average.load_state_dict(self.model.state_dict())
        self.optimizers = make_optimizers(self.model, self.settings)
        self.started = time.monotonic()
        self.seconds_before = 0.0

    def run(self, stop_at: int | None = None) -> Iterator[Progress]:
        """Train to the last step (or to ``stop_at``), reporting after each step."""
        settings = self.settings
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        while self.step < last:
            loss = self._train_step()
            self.step += 1
            self.loss = loss if self.step == 1 else self.loss + 0.02 * (loss - self.loss)
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self._validate()
            if self.step % settings.checkpoint_every == 0 or self.step == last:
                self.save()
            is_known = self.step >= settings.evaluate_every
            accuracy = 1 - sum(self.errors.values()) / len(self.errors)
            yield Progress(self.step, self.loss, accuracy if is_known else None)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier parts included."""
        return self.seconds_before + time.monotonic() - self.started

    def _train_step(self) -> float:
        """One batch, one step of every optimizer, one update of the average."""
        settings = self.settings
        device = torch.get_default_device()
        noise = torch.Generator(device).manual_seed(settings.seed * 1_000_003 + self.step)
        set_learning_rates(self.optimizers, self.step, settings)
        with torch.autocast(device.type, torch.bfloat16):
            loss = self.objective.loss(self.model.train(), self._draw_questions(), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update_average(self.average, self.model, self.step, settings.ema)
        return loss.item()

    def _draw_questions(self) -> list[Question]:
        """A batch of fresh questions; ``focus`` of them from families that still go wrong."""
        settings = self.settings
        rng = random.Random(f"{settings.seed} {self.step}")
        names = list(self.errors)
        # A family that is always right still gets one part in a hundred of the focus.
        by_error = [error + 0.01 for error in self.errors.values()]
        total = sum(by_error)
        weights = [
            (1 - settings.focus) / len(names) + settings.focus * error / total for error in by_error
        ]
        return [
            question(family, "train", rng.getrandbits(48), settings.seed)
            for family in rng.choices(names, weights, k=settings.batch_size)
        ]

    def _validate(self) -> None:
        """Ask the average of the weights; one row of the log."""
        steps_per_block = []
        for family in self.errors:
            asked = questions([family], "validation", self.settings.validation_questions)
            answers = self.objective.answer(
                self.average, [each.prompt for each in asked], self.settings.seed
            )
            pairs = zip(asked, answers.texts, strict=True)
            self.errors[family] = 1 - sum(q.is_correct(text) for q, text in pairs) / len(asked)
            steps_per_block.append(answers.steps_per_block)
        row = {
            "step": self.step,
            "seconds": round(self.seconds),
            "loss": round(self.loss, 4),
            "steps_per_block": round(sum(steps_per_block) / len(steps_per_block), 2),
            **{family: round(1 - error, 4) for family, error in self.errors.items()},
        }
        append_row(self.out / LOG, row)

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the one before."""
        state = {
            "settings": self.settings.to_mapping(),
            "started_from": self.started_from,
            "step": self.step,
            "loss": self.loss,
            "errors": self.errors,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        save_state(self.out / CHECKPOINT, state)

    def resume(self) -> None:
        """Go on from the checkpoint of the directory.

        Raises:
            ValueError: it was written by a run with other settings.
        """
        state = torch.load(
            self.out / CHECKPOINT, weights_only=True, map_location=torch.get_default_device()
        )
        mine = self.settings.to_mapping()
        for name, value in state["settings"].items():
            if mine.get(name) != value:
                raise ValueError(
                    f"{self.out / CHECKPOINT} was trained with {name} = {value!r}, the config says "
                    f"{mine.get(name)!r}; give another --out, or the config that it came from."
                )
        self.started_from = state.get("started_from", "")
        self.step, self.loss = state["step"], state["loss"]
        self.errors = state["errors"]
        self.seconds_before = state["seconds"]
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        forget_later_rows(self.out / LOG, self.step)


def load_start(model: PreTrainedModel, start_from: Path) -> None:
    """Give a model the weights of a checkpoint of the same kind and shape.

    Raises:
        ValueError: it is of another kind or shape.
    """
    kind = json.loads((start_from / "config.json").read_text())["architectures"][0]
    if kind != type(model).__name__:
        raise ValueError(f"{start_from} is a {kind}; allowed: a {type(model).__name__}.")
    start = type(model).from_pretrained(start_from, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        has, wants = tuple(start[name].shape) if name in start else None, tuple(tensor.shape)
        if has != wants:
            raise ValueError(
                f"{start_from} has {name} of shape {has}, [model] of the config makes it {wants}; "
                "give the config that has its sizes, or another checkpoint."
            )
    model.load_state_dict(start)


def digest_of(checkpoint: Path) -> str:
    """SHA-256 of the weights of a checkpoint directory."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
