"""README sections about the sampling step: its time and its memory beside the built-in one's."""

from pathlib import Path

from bench.context import read_csv
from bench.markdown import markdown, measured_with

# Memory is shown in GiB.
GIB = 2**30


def sampling_step(results: Path) -> str:
    """Milliseconds and ratios, a line for each shape and profile of the logits."""
    rows = read_csv(results / "sampling_step_cpu.csv")
    if not rows:
        return "Not measured yet: `python -m bench.sampling_step`."
    shape_of = ("rows", "vocab_size", "hidden", "profile")
    lines = []
    for shape in dict.fromkeys(tuple(row[name] for name in shape_of) for row in rows):
        here = {
            row["implementation"]: row
            for row in rows
            if tuple(row[name] for name in shape_of) == shape
        }
        times = [f"{float(row['p50_ms']):.1f}" for row in here.values()]
        faster = [
            f"{float(row['faster_than_builtin']):.2f} "
            f"[{float(row['faster_low']):.2f} .. {float(row['faster_high']):.2f}]"
            for row in here.values()
            if row["implementation"].startswith("ours") and row["faster_than_builtin"]
        ]
        num_rows, vocab_size, *rest = shape
        lines.append([num_rows, f"{int(vocab_size):,}", *rest, " / ".join(times), *faster])
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    compared = [f"built-in / {name}" for name in names if name.startswith("ours")]
    header = ["rows", "vocabulary", "hidden", "logits", f"ms: {' / '.join(names)}", *compared]
    return f"{markdown(header, lines)}\n\n{measured_with(rows, 'sampling_step_cpu.csv')}"


def sampling_memory(results: Path) -> str:
    """Peak bytes, computed and measured, a line for each number of canvases."""
    rows = read_csv(results / "sampling_step_memory_cpu.csv")
    if not rows:
        return "Not measured yet: `python -m bench.sampling_step --memory`."
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for count in dict.fromkeys(row["canvases"] for row in rows):
        here = {row["implementation"]: row for row in rows if row["canvases"] == count}
        cells = []
        for name in names:
            computed, measured = (here[name][f"{how}_bytes"] for how in ("computed", "measured"))
            text = f"{float(measured) / GIB:.2f}" if measured else "not measured"
            cells.append(f"{float(computed) / GIB:.2f} ({text})")
        lines.append([count, *cells])
    header = ["canvases of 256", *(f"{name}, GiB" for name in names)]
    return f"{markdown(header, lines)}\n\n{measured_with(rows, 'sampling_step_memory_cpu.csv')}"
