"""The learning curve of a run, drawn from its log."""

import csv
from pathlib import Path


def draw(log: Path, path: Path) -> None:
    """Loss, and validation accuracy of each family, against optimizer steps, as an SVG."""
    from matplotlib.figure import Figure

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return
    families = [
        name for name in rows[0] if name not in ("step", "seconds", "loss", "steps_per_block")
    ]
    steps = [int(row["step"]) for row in rows]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [float(row["loss"]) for row in rows], color="black")
    left.set(xlabel="optimizer step", ylabel="training loss, nats", yscale="log")
    for family in families:
        right.plot(steps, [100 * float(row[family]) for row in rows], label=family, linewidth=1)
    right.set(xlabel="optimizer step", ylabel="validation answers correct, %", ylim=(-2, 102))
    right.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None})
