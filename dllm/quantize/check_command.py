"""``dllm check-quant``: prints, or writes as JSON, what is wrong with a quantized checkpoint."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from dllm.settings.command import FAILED, OK, write_findings

if TYPE_CHECKING:
    from dllm.quantize.verify import Report

LISTED = 20  # outliers and problems that are printed; JSON has all


def main(argv: Sequence[str]) -> int:
    """The exit status is 0 if the checkpoint has no problem, else 1."""
    parser = argparse.ArgumentParser(
        prog="dllm check-quant", description="Check a quantized checkpoint.", allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, help="directory of a quantized checkpoint")
    parser.add_argument("--against", type=Path, help="the checkpoint that it was made from")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found; -: print")
    args = parser.parse_args(argv)
    from dllm.quantize.checkpoint import Checkpoint
    from dllm.quantize.linears import linears
    from dllm.quantize.verify import verify

    checkpoint = Checkpoint(args.checkpoint)
    original = Checkpoint(args.against) if args.against else None
    console, is_shown = Console(stderr=True), sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("layers", total=len(linears(checkpoint.config)))
        report = verify(checkpoint, original, lambda: progress.advance(task))
    if args.json is not None:
        title = {"path": str(args.checkpoint), "ok": not report.problems}
        write_findings(args.json, title | dataclasses.asdict(report))
    if str(args.json) != "-":
        print("\n".join(in_words(args.checkpoint, report)))
    return FAILED if report.problems else OK


def in_words(path: Path, report: "Report") -> list[str]:
    """The lines that the command prints; the last one says whether the checkpoint can be served."""
    from dllm.quantize.checkpoint import in_units

    layers = ", ".join(f"{count} layers {name}" for name, count in report.schemes.items())
    size = in_units(report.num_bytes)
    if report.original_bytes is not None:
        share = report.num_bytes / report.original_bytes
        size += f", {share:.0%} of the original's {in_units(report.original_bytes)}"
    lines = [f"{path}: {layers or 'no layer is quantized'}; {size}"]
    if report.errors:
        values = sorted(report.errors.values())
        worst = max(report.errors, key=lambda module: report.errors[module])
        lines.append(
            f"relative error of weights: median {statistics.median(values):.2%}, largest "
            f"{values[-1]:.2%} ({worst})"
        )
    outliers = sorted(report.outliers.items(), key=lambda item: -item[1])
    lines += first(f"outlier: {module} {error:.2%}" for module, error in outliers)
    lines += [f"note: {note}" for note in report.notes]
    lines += first(f"PROBLEM: {problem}" for problem in report.problems)
    return [*lines, "no problem found" if not report.problems else "not fit to be served"]


def first(lines: Iterable[str]) -> list[str]:
    found = list(lines)
    more = [f"and {len(found) - LISTED} more (--json lists all)"] if len(found) > LISTED else []
    return found[:LISTED] + more
