"""Shows how far a command is: a bar in a terminal, elsewhere a line every few seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dllm.train.learner import TIMED_CONTEXT
from dllm.train.network import count_params
from dllm.train.precision import processor
from dllm.train.run import Run

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
        """So much more is done; the note stands behind it."""
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
    """Train to the last step, with the running loss and the last evaluation shown.

    First it says how large the drafter is, and how long a pass of it takes on this device.
    """
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
