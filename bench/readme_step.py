"""README sections about one step: where its time goes, how it grows, the floor of a GPU's pass."""

from __future__ import annotations

from pathlib import Path

from bench.context import read_csv
from bench.growth import word
from bench.markdown import Rows, figure, markdown, measured_with

GROUPS = ("engine", "forward", "head", "sampler", "idle")


def step_time(results: Path) -> str:
    """Shares by group, a line for each server, mode and load."""
    rows = read_csv(results / "profile_cpu.csv")
    if not rows:
        return "Not measured yet: `python -m bench.profile_step`."
    lines = []
    for bar in dict.fromkeys((r["mode"], r["server"], r["concurrency"]) for r in rows):
        here = [r for r in rows if (r["mode"], r["server"], r["concurrency"]) == bar]
        mode, server, load = bar
        shares = (sum(float(r["share"]) for r in here if r["group"] == group) for group in GROUPS)
        cells = [f"{share:.0%}" for share in shares]
        lines.append([f"{server}, {mode}", load, f"{float(here[0]['step_ms']):.2f}", *cells])
    header = ("", "requests at once", "ms per step", *GROUPS)
    return "\n\n".join(
        [
            markdown(header, lines),
            *figure(results, "time_cpu", "Milliseconds of a step by component"),
            measured_with(rows, "profile_cpu.csv"),
        ]
    )


def step_growth(results: Path) -> str:
    """The fit of the whole step on every axis, and what is superlinear."""
    rows = read_csv(results / "scaling.csv")
    fits = [row for row in rows if row["kind"] == "fit"]
    if not fits:
        return "Not measured yet: `python -m bench.scaling`."
    lines = []
    for axis in dict.fromkeys(row["axis"] for row in fits):
        here = [r for r in fits if r["axis"] == axis]
        step = next(r for r in here if r["component"] == "step")
        bent = [r["component"] for r in _first_of_each(here) if r["growth"] == "superlinear"]
        values = [int(r["value"]) for r in here if r["component"] == "step"]
        ends = [f"{float(r['ms_per_step']):.1f}" for r in _measured_ends(rows, axis)]
        middle, low, high = (float(step[f"exponent{end}"]) for end in ("", "_low", "_high"))
        is_constant = step["growth"] == "constant"
        lines.append(
            [
                f"{axis} {min(values):,} to {max(values):,}",
                " to ".join(ends),
                "constant" if is_constant else word(low, high),
                "-" if is_constant else f"{middle:.2f} [{low:.2f} .. {high:.2f}]",
                ", ".join(bent) or "-",
            ]
        )
    header = ("", "ms per step", "growth", "p of a + b x^p [90%]", "superlinear")
    return "\n\n".join(
        [
            markdown(header, lines),
            *figure(results, "scaling", "Step time against four axes"),
            measured_with(rows, "scaling.csv"),
        ]
    )


def _first_of_each(fits: Rows) -> Rows:
    """One row for each component: its fit is the same on all of them."""
    return list({row["component"]: row for row in reversed(fits)}.values())[::-1]


def _measured_ends(rows: Rows, axis: str) -> Rows:
    """The whole step at the smallest and the largest value."""
    wanted = (axis, "step", "measured")
    here = [row for row in rows if (row["axis"], row["component"], row["kind"]) == wanted]
    here.sort(key=lambda row: int(row["value"]))
    return [here[0], here[-1]]


def floors(results: Path) -> str:
    """The least time of a pass of the released model, and what an engine was measured at."""
    rows = [row for row in read_csv(results / "roofline.csv") if row["component"] == "pass"]
    if not rows:
        return "Not computed yet: `python -m bench.roofline`."
    measured: dict[tuple[str, str], list[str]] = {}
    for path in sorted(results.glob("h200_engine_*.csv")):
        for row in read_csv(path):
            if row["component"] == "pass" and row["model"] == "released":
                text = f"{row['server']} {float(row['ms_per_step']):.1f} ms"
                measured.setdefault((row["weights"], row["batch"]), []).append(text)
    lines = []
    for row in rows:
        known = measured.get((row["weights"], row["batch"]))
        lines.append(
            [
                row["weights"],
                row["batch"],
                f"{float(row['floor_ms']):.1f}",
                f"{float(row['tokens_per_s']):,.0f}",
                ", ".join(known) if known else "not measured",
            ]
        )
    header = ("weights", "batch", "floor, ms a pass", "tokens/s at most", "measured")
    return "\n\n".join([markdown(header, lines), measured_with(rows, "roofline.csv")])
