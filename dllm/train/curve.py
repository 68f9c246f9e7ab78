"""The learning curve of a run, drawn from its log."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dllm.settings.command import CommandError
from dllm.train.run_files import CURVE, LOG, read_log

COMMON_COLUMNS = ("step", "seconds", "loss")


@dataclass(frozen=True)
class Panel:
    """Some columns of the log against optimizer steps.

    Attributes:
        ylabel: what they are, with its unit.
        shows: whether a column belongs into the panel.
        is_share: values are in [0, 1] and drawn in per cent.
        legend: title of the legend.
    """

    ylabel: str
    shows: Callable[[str], bool]
    is_share: bool = False
    legend: str = ""


def require_matplotlib() -> None:
    """Refuse to start a run whose curve could not be drawn.

    Raises:
        CommandError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the learning curve needs matplotlib: pip install 'dllm[train]'.")


def draw(out: Path, *panels: Panel) -> None:
    """Write ``curve.svg`` into the directory of a run: the loss, then the panels."""
    from matplotlib.figure import Figure

    rows = read_log(out / LOG) if (out / LOG).exists() else []
    if not rows:
        return
    figure = Figure(figsize=(4.5 * (1 + len(panels)), 4.5), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(panels))
    trained = [row for row in rows if int(row["step"])]  # before the first step there is no loss
    first.plot(_values(trained, "step"), _values(trained, "loss"), color="black")
    first.set(xlabel="optimizer step", ylabel="training loss, nats", yscale="log")
    for panel, axes in zip(panels, others, strict=True):
        for name in rows[0]:
            if name not in COMMON_COLUMNS and panel.shows(name):
                values = _values(rows, name, 100 if panel.is_share else 1)
                axes.plot(_values(rows, "step"), values, label=name, linewidth=1)
        axes.set(xlabel="optimizer step", ylabel=panel.ylabel)
        if panel.is_share:
            axes.set(ylim=(-2, 102))
        axes.legend(fontsize=7, ncols=2, title=panel.legend or None)
    figure.savefig(out / CURVE, metadata={"Date": None})


def _values(rows: list[dict[str, str]], name: str, scale: float = 1) -> list[float]:
    return [scale * float(row[name]) for row in rows]
