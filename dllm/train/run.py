"""The training loop of a drafter: the same run when it is resumed.

Everything random in step i comes from (seed, i), so a run that was stopped and resumed ends with
the same bits as one that was not.
"""

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from dllm.settings.command import CommandError
from dllm.train.learner import DraftLearner
from dllm.train.network import DraftNetwork
from dllm.train.optimizer import make_optimizers, set_learning_rates, update_average
from dllm.train.run_files import LOG, MODEL, STATE, write_log


class Run:
    """One run in one directory.

    Attributes:
        out: the directory; None for a run without log and checkpoint.
        loss: running mean over about fifty steps.
        rows: of the log, one for each evaluation: step, seconds, loss, and the learner's columns.
    """

    def __init__(self, learner: DraftLearner, out: Path | None) -> None:
        self.learner, self.out = learner, out
        self.settings = learner.settings
        torch.set_num_threads(self.settings.threads)
        self.model = learner.model
        self.average: DraftNetwork = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizers = make_optimizers(self.model, self.settings)
        self.device = next(self.model.parameters()).device
        self.step, self.loss = 0, 0.0
        self.rows: list[dict[str, float]] = []
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier parts included."""
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
        """Evaluate the average of the weights; one row of the log."""
        columns = self.learner.evaluate(self.average)
        row = {"step": self.step, "seconds": round(self.seconds), "loss": round(self.loss, 4)}
        self.rows.append(row | columns)
        if self.out is not None:
            write_log(self.out / LOG, self.rows)

    def save(self) -> None:
        """Write the state to resume from, and what can be served of it to ``OUT/model``.

        An interrupted write leaves the state before.
        """
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
        temporary = self.out / f"{STATE}.part"
        torch.save(state, temporary)
        temporary.replace(self.out / STATE)
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
