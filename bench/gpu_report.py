"""What ``bench.gpu`` found: speeds, and where each millisecond above the floor goes.

    python -m bench.gpu_report DIR...        # folders of several calls

A floor is that of ``bench.roofline`` for the same batch behind the same prompts, with the copy and
the product that the attention part measured, if it ran, otherwise with those of an H200 that are
written there. Two tables say where the time above it goes: one by the parts of an engine step
(``bench.profile_step``), one by classes of kernels (``bench.kernel_table``), of another run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kernel_table, step_parts
from bench.context import Rows, read_csv
from bench.roofline import H200, Gpu, Pass, components, released_config
from dllm.models.gemma.tiny import tiny_config

CONTEXT = 1024  # tokens of the prompts
# Components of the floor, by the part of a step that computes them; all others are in the forward
# pass. Scheduling, decisions and waiting have a floor of zero.
PART_OF = {
    "self-conditioning": step_parts.SELF_CONDITIONING,
    "head": step_parts.HEAD,
    "statistics": step_parts.STATISTICS,
    "soft embedding": step_parts.SOFT_EMBEDDING,
}
# The same by the class of kernels; all others are products.
CLASS_OF = {
    "sliding: attention": kernel_table.ATTENTION,
    "full: attention": kernel_table.ATTENTION,
    "experts": kernel_table.EXPERTS,
    "statistics": kernel_table.SAMPLER,
    "embedding": kernel_table.REST,
    "residual stream": kernel_table.REST,
}


@dataclass(frozen=True)
class Found:
    """The CSV files of one run or of several calls.

    Attributes:
        folders: with a folder for each part in them.
        text: text_config of the model that was served.
        canvas: tokens of its canvas.
    """

    folders: tuple[Path, ...]
    text: dict[str, Any]
    canvas: int

    @classmethod
    def of(cls, folders: Iterable[Path], *, is_toy: bool) -> Found:
        """Of a run at toy size, or of the released shape."""
        config: dict[str, Any] = tiny_config() if is_toy else released_config()
        return cls(tuple(folders), config["text_config"], config["canvas_length"])

    def rows(self, pattern: str) -> Rows:
        """Of all files that match: ``part/name.csv``."""
        paths = [path for folder in self.folders for path in sorted(folder.glob(pattern))]
        return [row for path in paths for row in read_csv(path)]

    def gpu(self) -> Gpu:
        """Speeds that were measured, or an H200's."""
        for row in self.rows("attention/attention_gpu.csv"):
            bf16 = float(row["bf16"])
            return replace(H200, copy=float(row["copy"]), bf16=bf16, fp8=2 * bf16)
        return H200

    def floors(self, weights: str, batch: int) -> dict[str, float]:
        """Milliseconds of each component of a pass."""
        gpu, one = self.gpu(), Pass(weights, batch, CONTEXT, self.canvas)
        return {work.component: work.floor_ms(gpu) for work in components(self.text, one)}


def summed(floors: dict[str, float], where: dict[str, str], other: str) -> dict[str, float]:
    """Floors by part or by class; components that ``where`` does not name belong to ``other``."""
    result: dict[str, float] = {}
    for component, floor_ms in floors.items():
        name = where.get(component, other)
        result[name] = result.get(name, 0.0) + floor_ms
    return result


def gap_table(title: str, measured: dict[str, float], floors: dict[str, float]) -> str:
    """A line for each name: measured, floor, the difference, and its share of all differences."""
    names = list(dict.fromkeys([*measured, *floors]))
    total_ms, floor_ms = sum(measured.values()), sum(floors.values())
    lines = [
        f"{title}: {total_ms:.3f} ms a pass, floor {floor_ms:.3f}, "
        f"{total_ms - floor_ms:.3f} above it",
        f"  {'':30} {'ms':>9} {'floor':>9} {'above':>9} {'share':>7}",
    ]
    for name in names:
        ms, least = measured.get(name, 0.0), floors.get(name, 0.0)
        share = (ms - least) / (total_ms - floor_ms) if total_ms != floor_ms else 0.0
        lines.append(f"  {name:30} {ms:9.3f} {least:9.3f} {ms - least:9.3f} {share:7.1%}")
    return "\n".join(lines)


def gaps(found: Found) -> list[str]:
    """Both tables for each profiled part, server and load."""
    tables = []
    for weights in ("fp8", "bf16"):
        for kind, column in (("profile", "component"), ("kernels", "class")):
            rows = found.rows(f"profile-{weights}/{kind}_c*.csv")  # cuda, or cpu
            for server, load in dict.fromkeys((row["server"], row["concurrency"]) for row in rows):
                floors = found.floors(weights, int(load))
                where, other = PART_OF, step_parts.FORWARD
                if kind == "kernels":
                    where, other = CLASS_OF, kernel_table.PRODUCTS
                measured: dict[str, float] = {}
                for row in rows:
                    if (row["server"], row["concurrency"]) == (server, load):
                        ms = milliseconds(row)
                        measured[row[column]] = measured.get(row[column], 0.0) + ms
                title = f"{weights}, batch {load}, {server}, by {column}"
                tables.append(gap_table(title, measured, summed(floors, where, other)))
    return tables


def milliseconds(row: dict[str, str]) -> float:
    """Of a row of either table."""
    return float(row["ms"]) if "ms" in row else float(row["share"]) * float(row["step_ms"])


def speeds(found: Found, *, is_toy: bool) -> list[str]:
    """One line for each load of a server, beside the floor of a pass.

    A denoise step of a request is a pass of its batch; prefill, commits and waiting are in it.
    """
    lines = []
    for part in ("serve-fp8", "graphs-fp8", "serve-bf16"):
        weights = part.partition("-")[2]
        for row in found.rows(f"{part}/serve_*.csv"):
            if not row["tokens_per_s"]:
                continue
            step_ms = float(row["ms_per_denoise_step"])
            floor_ms = sum(found.floors(weights, int(row["concurrency"])).values())
            above = "" if is_toy else f", {step_ms / floor_ms:.2f} x its floor"
            lines.append(
                f"{part} round {int(row['pair']) + 1} batch {row['concurrency']:>2} "
                f"{step_ms:8.2f} ms a denoise step, {float(row['tokens_per_s']):9.1f} tokens/s"
                f"{above}  {row['contestant']} ({row['machine']})"
            )
    return lines


def report(*folders: Path, is_toy: bool) -> str:
    """What was run, and all tables."""
    found = Found.of(folders, is_toy=is_toy)
    nothing_means = " (toy sizes: no figure means anything)" if is_toy else ""
    lines = [f"=== what was run{nothing_means}"]
    lines += [f"{row['part']:14} {row['outcome']}" for row in found.rows("gpu_parts.csv")]
    lines += ["", *(speeds(found, is_toy=is_toy) or ["No engine was measured."]), ""]
    gpu = found.gpu()
    lines += [
        f"=== where the time above the floor goes{nothing_means}: "
        f"copy {gpu.copy / 1e12:.2f} TB/s, bf16 {gpu.bf16 / 1e12:.0f} TFLOP/s",
        *(gaps(found) or ["No step was profiled."]),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of the folders of one or several calls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--toy", action="store_true", help="they were written with --toy")
    options = parser.parse_args(arguments)
    print(report(*options.folders, is_toy=options.toy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
