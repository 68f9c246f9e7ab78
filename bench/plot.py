"""Draws bench/results/*.csv as SVG files beside them; what has no CSV is not drawn.

    python -m bench.plot                    # all of them
    python -m bench.plot --results DIR

    latency_MODE.svg    throughput against latency, one line a server, one point a load
    steps.svg           denoise steps per block by task family
    time_DEVICE.svg     where the time of a denoise step goes
    scaling.svg         step time against concurrency, canvas, context and vocabulary

Each says on which machine and commit its numbers were measured.
"""

from __future__ import annotations

import argparse
import bisect
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.context import RESULTS, read_csv
from bench.measure import AUTOREGRESSIVE, BUILTIN, OURS, REFERENCE
from bench.report import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

Rows = list[dict[str, str]]
COLORS = {OURS: "#1f5fa8", BUILTIN: "#d1741f", AUTOREGRESSIVE: "#4a8c4a", REFERENCE: "#777777"}
OTHERS = ("#8c5fa8", "#a85f5f", "#5fa8a3", "#b5a642")
GROUPS = {
    "engine": "Oranges",
    "forward": "Blues",
    "head": "Purples",
    "sampler": "Greens",
    "idle": "Greys",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what can be drawn; 1 if nothing can."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    results = parser.parse_args(arguments).results
    drawn = draw_all(results)
    for path in drawn:
        print(path)
    if not drawn:
        print(f"no CSV to draw in {results}: run `make bench` first.", file=sys.stderr)
    return 0 if drawn else 1


def draw_all(results: Path) -> list[Path]:
    """Every figure whose CSV is there."""
    wanted: list[tuple[str, str, Callable[[Rows], Figure]]] = [
        *((f"serve_{mode}", f"latency_{mode}", latency) for mode in ("compiled", "eager")),
        ("answers", "steps", steps_by_family),
        *((f"profile_{device}", f"time_{device}", breakdown) for device in ("cpu", "cuda")),
        ("scaling", "scaling", scaling),
    ]
    drawn = []
    for name, picture, draw in wanted:
        rows = read_csv(results / f"{name}.csv")
        if rows:
            figure = draw(rows)
            figure.text(
                0.995, 0.005, label(rows), ha="right", va="bottom", fontsize=6, color="#555"
            )
            drawn.append(results / f"{picture}.svg")
            figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def label(rows: Rows) -> str:
    """Hardware, versions and commit of a CSV."""
    first = rows[0]
    return f"{first['machine']}; {first['versions']}; commit {first['commit']}"


def new_figure(width: float, height: float) -> Figure:
    """A figure that leaves room for the line at the bottom."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    matplotlib.rcParams["svg.hashsalt"] = "bench"  # the same CSV gives the same file
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.97)))


def color(name: str, index: int) -> str:
    """Of a contestant: the same in every figure."""
    return COLORS.get(name, OTHERS[index % len(OTHERS)])


def logarithmic(axis: Axes, **labels: str) -> None:
    """Logarithmic scales whose ticks are plain numbers, and a grid; call it after drawing."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set(xscale="log", yscale="log", **labels)
    for one in (axis.xaxis, axis.yaxis):
        low, high = one.get_view_interval()
        one.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        one.set_major_formatter(FuncFormatter(plain))
        one.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=7)
    axis.grid(True, linewidth=0.3)


def plain(value: float, _: int = 0) -> str:
    """A number without an exponent, thousands with a k."""
    return f"{value:g}" if value < 10_000 else f"{value / 1000:g}k"


def median(rows: Rows, column: str) -> float | None:
    """Of the rows that have a value."""
    values = [float(row[column]) for row in rows if row[column]]
    return Spread.of(values).median if values else None


# --- serving -------------------------------------------------------------------------------------


def latency(rows: Rows) -> Figure:
    """Throughput against end-to-end latency; p50 solid, p99 dotted; a panel a workload."""
    panels = list(dict.fromkeys((row["schedule"], row["prompts"]) for row in rows))
    figure = new_figure(4.6 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        here = [row for row in rows if (row["schedule"], row["prompts"]) == panel]
        for index, name in enumerate(dict.fromkeys(row["contestant"] for row in here)):
            _latency_line(axis, [row for row in here if row["contestant"] == name], name, index)
        logarithmic(axis, xlabel="output tokens per second", ylabel="end-to-end latency, ms")
        axis.set_title(f"{panel[0]} denoise steps, {panel[1]}", fontsize=9)
        axis.legend(fontsize=7)
    figure.suptitle(
        "solid: median, dotted: p99; numbers at the points: requests at once; "
        "hollow: requests arriving per second",
        fontsize=8,
    )
    return figure


def _latency_line(axis: Axes, rows: Rows, name: str, index: int) -> None:
    """Closed loops are joined by a line; request rates are hollow points."""
    shade = color(name, index)
    loads = sorted({row["concurrency"] for row in rows if row["concurrency"]}, key=int)
    points = []
    for load in loads:
        here = [row for row in rows if row["concurrency"] == load]
        x, y, high = (median(here, k) for k in ("tokens_per_s", "latency_ms", "latency_p99_ms"))
        if x is not None and y is not None and high is not None:
            points.append((x, y, high))
            axis.annotate(load, (x, y), fontsize=7, xytext=(3, -9), textcoords="offset points")
    if points:
        xs, ys, highs = zip(*points, strict=True)
        axis.plot(xs, ys, "o-", color=shade, markersize=4, label=name)
        axis.plot(xs, highs, ":", color=shade, linewidth=1)
    for rate in sorted({row["rate"] for row in rows if row["rate"]}, key=float):
        here = [row for row in rows if row["rate"] == rate]
        x, y = median(here, "tokens_per_s"), median(here, "latency_ms")
        if x is not None and y is not None:
            axis.plot([x], [y], "D", color=shade, markersize=5, fillstyle="none")
            text = f"{float(rate):g}/s"
            axis.annotate(
                text, (x, y), fontsize=6, color=shade, xytext=(5, -2), textcoords="offset points"
            )


def steps_by_family(rows: Rows) -> Figure:
    """A histogram of denoise steps per block for every family, ours beside the others."""
    diffusion = [row for row in rows if row["steps_per_block"]]
    families = list(dict.fromkeys(row["family"] for row in diffusion))
    names = list(dict.fromkeys(row["contestant"] for row in diffusion))
    columns = min(5, len(families))
    lines = math.ceil(len(families) / columns)
    figure = new_figure(2.4 * columns, 0.8 + 1.9 * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for axis in axes[len(families) :]:
        axis.set_visible(False)
    for number, (axis, family) in enumerate(zip(axes, families, strict=False)):
        for index, name in enumerate(names):
            here = [r for r in diffusion if (r["family"], r["contestant"]) == (family, name)]
            counts = Counter(_bin(float(row["steps_per_block"])) for row in here)
            left = [place + (index + 0.5) / len(names) - 0.5 for place in range(len(STEP_BINS))]
            heights = [counts[place] for place in range(len(STEP_BINS))]
            axis.bar(left, heights, 1 / len(names), color=color(name, index))
        axis.set_title(family, fontsize=8)
        axis.set_xticks(range(len(STEP_BINS)), [str(step) for step in STEP_BINS], fontsize=6)
        axis.tick_params(axis="y", labelsize=7)
        axis.tick_params(axis="x", labelbottom=number + columns >= len(families))  # nothing below
        axis.yaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("denoise steps per block, at most", fontsize=8)
    figure.supylabel("answers", fontsize=8)
    handles = [_patch(color(name, index)) for index, name in enumerate(names)]
    figure.legend(handles, names, loc="outside upper right", fontsize=7, ncols=len(names))
    return figure


STEP_BINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # upper ends


def _bin(steps: float) -> int:
    """The first bin whose upper end is not below; the last takes the rest."""
    return min(bisect.bisect_left(STEP_BINS, steps), len(STEP_BINS) - 1)


def _patch(shade: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(color=shade)


# --- profiles ------------------------------------------------------------------------------------


def breakdown(rows: Rows) -> Figure:
    """Stacked bars of the milliseconds of a denoise step, one bar a server, mode and load."""
    import matplotlib

    bars = list(dict.fromkeys((r["mode"], r["server"], r["concurrency"]) for r in rows))
    components = list(dict.fromkeys((row["group"], row["component"]) for row in rows))
    figure = new_figure(8.5, 1.4 + 0.5 * len(bars))
    axis = figure.subplots()
    for group, component in components:
        members = [name for its, name in components if its == group]
        shades = matplotlib.colormaps[GROUPS.get(group, "Greys")]
        shade = shades(0.35 + 0.5 * members.index(component) / max(len(members) - 1, 1))
        for place, bar in enumerate(bars):
            here = [r for r in rows if (r["mode"], r["server"], r["concurrency"]) == bar]
            order = [(r["group"], r["component"]) for r in here]
            if (group, component) not in order:
                continue
            at = order.index((group, component))
            left = sum(float(r["ms_per_step"]) for r in here[:at])
            width = float(here[at]["ms_per_step"])
            axis.barh(place, width, left=left, color=shade, edgecolor="white", linewidth=0.5)
        axis.barh(0, 0, color=shade, label=component)
    names = [f"{server}, {mode}, {load} at once" for mode, server, load in bars]
    axis.set_yticks(range(len(bars)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of an engine step")
    figure.legend(loc="outside lower center", fontsize=7, ncols=4)
    return figure


# What the values of an axis of scaling.csv count.
SCALED = {
    "concurrency": "concurrency, requests at once",
    "canvas": "canvas, tokens",
    "context": "context, tokens",
    "vocabulary": "vocabulary, tokens",
}


def scaling(rows: Rows) -> Figure:
    """Step time against each axis, measured points and fitted curve, both scales logarithmic."""
    steps = [row for row in rows if row["component"] == "step"]
    panels = list(dict.fromkeys(row["axis"] for row in steps))
    figure = new_figure(3.4 * len(panels), 3.6)
    figure.suptitle(
        "points: medians, bars: fastest to slowest round, lines: fits; denoise steps only",
        fontsize=8,
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=True):
        here = [row for row in steps if row["axis"] == name]
        measured = [row for row in here if row["kind"] == "measured"]
        fitted = [row for row in here if row["kind"] == "fit"]
        xs = [float(row["value"]) for row in measured]
        ys = [float(row["ms_per_step"]) for row in measured]
        low = [y - float(row["low_ms"]) for y, row in zip(ys, measured, strict=True)]
        high = [float(row["high_ms"]) - y for y, row in zip(ys, measured, strict=True)]
        axis.errorbar(xs, ys, yerr=[low, high], fmt="o", color=COLORS[OURS], markersize=4)
        if fitted:
            axis.plot(
                [float(row["value"]) for row in fitted],
                [float(row["ms_per_step"]) for row in fitted],
                color="#999999",
                label=f"a + b x^{float(fitted[0]['exponent']):.2f}",
            )
            axis.legend(fontsize=7, loc="upper left")
        logarithmic(axis, xlabel=SCALED.get(name, name), ylabel="ms per step")
    return figure


if __name__ == "__main__":
    sys.exit(main())
