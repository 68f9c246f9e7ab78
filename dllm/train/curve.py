"""The learning curve of a run, drawn from its log."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dllm.settings.command import CommandError
from dllm.train.run_files import CURVE, LOG, read_log

COMMON_COLUMNS = ("step", "seconds", "loss")


class Panel(NamedTuple):
    """Some columns of the log against optimizer steps.

    Attributes:
        ylabel: what they are, with its unit.
        shows: whether a column belongs into the panel.
        is_share: values are in [0, 1] and drawn in per cent.
    """

    ylabel: str
    shows: Callable[[str], bool]
    is_share: bool = False


def require_matplotlib() -> None:
    """Refuse to start a run whose curve could not be drawn.

    Raises:
        CommandError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the learning curve needs matplotlib: pip install 'dllm[train]'.")


def draw(out: Path, *panels: Panel) -> None:
    """Write ``curve.svg`` into the directory of a run: the loss, then the panels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = read_log(out / LOG) if (out / LOG).exists() else []
    if not rows:
        return
    steps = [int(row["step"]) for row in rows]
    figure = Figure(figsize=(4.5 * (1 + len(panels)), 4.5), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(panels))
    first = 0 if steps[0] else 1  # at step 0 there is no loss yet
    left.plot(steps[first:], [float(row["loss"]) for row in rows[first:]], color="black")
    left.set(xlabel="optimizer step", ylabel="training loss, nats", yscale="log")
    for panel, axes in zip(panels, others, strict=True):
        scale = 100 if panel.is_share else 1
        for name in rows[0]:
            if name not in COMMON_COLUMNS and panel.shows(name):
                values = [scale * float(row[name]) for row in rows]
                axes.plot(steps, values, label=name, linewidth=1)
        axes.set(xlabel="optimizer step", ylabel=panel.ylabel)
        axes.legend(fontsize=7, ncols=2)
    with rc_context({"svg.fonttype": "none"}):  # text stays text: half the size of drawn letters
        figure.savefig(out / CURVE, metadata={"Date": None})
