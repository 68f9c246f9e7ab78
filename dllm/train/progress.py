"""Shows how far a command is: a bar in a terminal, elsewhere a line every few seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from dllm.train.run import AnyLearner, Run

SECONDS_BETWEEN_LINES = 10.0


class Shown:
    """Work of ``total`` parts, of which some were done before (by a run that is resumed)."""

    def __init__(self, what: str, total: int, done: int, bar: Progress | None) -> None:
        self.what, self.total, self.done = what, total, done
        self._begun_with, self._bar = done, bar
        self._start, self._said = time.monotonic(), -SECONDS_BETWEEN_LINES
        if bar is not None:
            self._task = bar.add_task(what, total=total, completed=done, note="")

    def advance(self, by: int = 1, note: str = "") -> None:
        """So much more is done; the note stands behind it."""
        self.done += by
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
            return
        seconds = time.monotonic() - self._start
        if self.done >= self.total or seconds - self._said >= SECONDS_BETWEEN_LINES:
            self._said = seconds
            print(self.line(seconds, note), flush=True)

    def line(self, seconds: float, note: str) -> str:
        """How far it is after so many seconds, in words."""
        each = seconds / max(1, self.done - self._begun_with)
        left = each * (self.total - self.done)
        return (
            f"{self.what}: {self.done}/{self.total}, {each:.3g} s each, {left / 60:.1f} minutes "
            f"left  {note}"
        ).rstrip()


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Shown]:
    """Show progress inside the ``with`` block."""
    console = Console()
    if not console.is_terminal:
        yield Shown(what, total, done, None)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield Shown(what, total, done, bar)


def train_shown(run: Run[AnyLearner], what: str) -> None:
    """Train to the last step, with the running loss and the last evaluation shown."""
    with progress(what, run.settings.steps, run.step) as shown:
        for _ in run.run():
            shown.advance(note=f"loss {run.loss:.3f}  {run.learner.summary()}")
