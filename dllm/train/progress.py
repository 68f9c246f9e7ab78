"""The progress bar of everything that takes long in ``dllm train`` and ``dllm calibrate``."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dllm.train.run import AnyLearner, Run


class Bar:
    """A bar on the screen."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, by: int = 1) -> None:
        """So much more is done."""
        self._progress.advance(self._task, by)

    def show(self, done: int, note: str) -> None:
        """So much is done in all; the note stands behind the bar."""
        self._progress.update(self._task, completed=done, note=note)


@contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Bar]:
    """Show a bar inside the ``with`` block."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns) as progress:
        yield Bar(progress, progress.add_task(what, total=total, completed=done, note=""))


def train_with_bar(run: Run[AnyLearner], what: str) -> None:
    """Train to the last step, with the running loss and the last evaluation behind the bar."""
    with progress_bar(what, run.settings.steps, run.step) as bar:
        for now in run.run():
            bar.show(now.step, f"loss {now.loss:.3f}  {now.summary}")
