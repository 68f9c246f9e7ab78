"""The training loop of a drafter: the same run when it is resumed; and how far a command is.

Everything random in step i comes from (seed, i), so a run that was stopped and resumed ends with
the same bits as one that was not. A terminal shows a bar, a log a line every few seconds.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from dllm.settings.command import CommandError
from dllm.settings.files import whole
from dllm.train.export import LOG, MODEL, STATE, write_log
from dllm.train.learner import TIMED_CONTEXT, DraftLearner
from dllm.train.network import DraftNetwork, count_params
from dllm.train.optimizer import make_optimizers, processor, set_learning_rates, update_average


class Run:
    """One run in one directory; None: a run without log and checkpoint."""

    def __init__(self, learner: DraftLearner, out: Path | None) -> None:
        self.learner, self.out = learner, out
        self.settings = learner.settings
        torch.set_num_threads(self.settings.threads)
        self.model = learner.model
        self.average: DraftNetwork = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizers = make_optimizers(self.model, self.settings)
        self.device = next(self.model.parameters()).device
        self.step, self.loss = 0, 0.0  # loss: running mean over about fifty steps
        self.rows: list[dict[str, float]] = []  # of the log, one for each evaluation
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
COLUMNS = (
    TextColumn("[bold]{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[note]}"),
)


class Shown:
    """Work of ``total`` parts, of which some were done before (by a run that is resumed)."""

    def __init__(self, what: str, total: int, done: int, bar: Progress) -> None:
        self.what, self.total, self.done = what, total, done
        self._bar, self._task = bar, bar.add_task(what, total=total, completed=done, note="")
        self._begun_with = done
        self._start, self._said = time.monotonic(), -SECONDS_BETWEEN_LINES

    def advance(self, by: int = 1, note: str = "") -> None:
        self.done += by
        self._bar.update(self._task, completed=self.done, note=note)
        seconds = time.monotonic() - self._start
        is_due = self.done >= self.total or seconds - self._said >= SECONDS_BETWEEN_LINES
        if self._bar.disable and is_due:
            self._said = seconds
            each = seconds / max(1, self.done - self._begun_with)
            left = f"{each:.3g} s each, {each * (self.total - self.done) / 60:.1f} minutes left"
            print(f"{self.what}: {self.done}/{self.total}, {left}  {note}".rstrip(), flush=True)


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Shown]:
    """Show work: on a terminal as a bar, elsewhere (in a log) as a line now and then."""
    console = Console()
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal) as bar:
        yield Shown(what, total, done, bar)


def train_shown(run: Run) -> None:
    learner = run.learner
    num_params, block = count_params(learner.drafter.read), learner.drafter.block
    print(
        f"drafter: {num_params / 1e6:.2f}M parameters, {2 * num_params / 1e6:.2f} MB in bf16; "
        f"{learner.pass_ms():.1f} ms a pass of {block} positions behind {TIMED_CONTEXT} tokens, on "
        f"{processor(run.device)}",
        flush=True,
    )
    with progress("train", run.settings.steps, run.step) as shown:
        for _ in run.run():
            shown.advance(note=f"loss {run.loss:.3f}  {run.learner.summary()}")
