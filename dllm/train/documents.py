"""What documents a run: its log and learning curve, and the parts that every model card has."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from dllm.settings.command import CommandError
from dllm.train.precision import processor
from dllm.train.run import AnyLearner, Run
from dllm.train.run_files import CURVE, LOG, write_log

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


def write_log_and_curve(run: Run[AnyLearner], path: Path, *panels: Panel) -> None:
    """Write ``log.csv`` and ``curve.svg`` (the loss, then the panels) beside the weights."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = run.rows
    if not rows:
        return
    write_log(path / LOG, rows)
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(4.5 * (1 + len(panels)), 4.5), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(panels))
    first = 0 if steps[0] else 1  # at step 0 there is no loss yet
    left.plot(steps[first:], [row["loss"] for row in rows[first:]], color="black")
    left.set(xlabel="optimizer step", ylabel="training loss, nats", yscale="log")
    for panel, axes in zip(panels, others, strict=True):
        scale = 100 if panel.is_share else 1
        for name in rows[0]:
            if name not in COMMON_COLUMNS and panel.shows(name):
                axes.plot(steps, [scale * row[name] for row in rows], label=name, linewidth=1)
        axes.set(xlabel="optimizer step", ylabel=panel.ylabel)
        axes.legend(fontsize=7, ncols=2)
    with rc_context({"svg.fonttype": "none"}):  # text stays text: half the size of drawn letters
        figure.savefig(path / CURVE, metadata={"Date": None})


def training_section(run: Run[AnyLearner], command: str, data: str, steps: str) -> list[str]:
    """The section of a model card on its training, as lines of Markdown, settings included.

    Args:
        command: the command line that made the weights.
        data: what they were trained on; steps: in which steps. Each is a sentence.
    """
    return [
        "## Training\n",
        f"- Data: {data}",
        f"- {run.step} steps of {steps}",
        f"- Reproduce with `{command}` and the settings below.",
        f"- {run.seconds / 60:.0f} minutes of training on {run.settings.threads} thread(s) of "
        f"{processor(run.device)}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}.\n",
        "```json",
        json.dumps(run.settings.to_mapping(), indent=2),
        "```",
    ]
