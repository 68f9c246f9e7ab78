"""What quantization costs: recovered accuracy with intervals, denoise steps, bytes; from the CSV.

recovery    right answers / right answers of the bf16 checkpoint to the same questions
interval    95%, by resampling questions with both of their answers (paired bootstrap)
steps       denoise steps / blocks, and that over the bf16 checkpoint's
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.context import read_csv
from bench.markdown import markdown, measured_with
from dllm.tools.eval_report import wilson_interval

BASELINE = "bf16"
RESAMPLES = 10_000
# What a format has to recover, in per cent, and how far steps per block may move from bf16's.
TARGETS = {"fp8-dynamic": 99.0, "nvfp4": 96.0}
STEPS_TOLERANCE = 0.05

Row = dict[str, str]


@dataclass(frozen=True)
class Result:
    """A contestant over all its questions.

    Attributes:
        num_both: questions that it and the baseline answered right.
    """

    num_questions: int
    num_correct: int
    num_baseline: int
    num_both: int
    denoise_steps: int
    blocks: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Result":
        """The sum of rows of a CSV."""
        columns = ("num_questions", "num_correct", "num_baseline", "num_both")
        sums = (sum(int(row[column]) for row in rows) for column in columns)
        counts = (sum(int(row[column] or 0) for row in rows) for column in ("steps", "blocks"))
        return cls(*sums, *counts)

    @property
    def recovery(self) -> float:
        """In per cent; NaN where the baseline knows nothing."""
        return 100 * self.num_correct / self.num_baseline if self.num_baseline else float("nan")

    @property
    def recovery_interval(self) -> tuple[float, float]:
        """In per cent. A question is right for both, for one of the two, or for neither."""
        alone, baseline_alone = (
            self.num_correct - self.num_both,
            self.num_baseline - self.num_both,
        )
        neither = self.num_questions - self.num_both - alone - baseline_alone
        counts = np.array([self.num_both, alone, baseline_alone, neither])
        draws = np.random.default_rng(0).multinomial(
            self.num_questions, counts / self.num_questions, size=RESAMPLES
        )
        ours, baseline = draws[:, 0] + draws[:, 1], draws[:, 0] + draws[:, 2]
        low, high = np.percentile(100 * ours / np.maximum(baseline, 1), [2.5, 97.5])
        return float(low), float(high)

    @property
    def steps_per_block(self) -> float:
        """NaN where the server counts no denoise steps."""
        return self.denoise_steps / self.blocks if self.blocks else float("nan")


def by_contestant(rows: Sequence[Row]) -> dict[str, Result]:
    """Each contestant's sum, in the order of the rows."""
    names = dict.fromkeys(row["contestant"] for row in rows)
    return {name: Result.of([row for row in rows if row["contestant"] == name]) for name in names}


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heading and one line a contestant."""
    heading = ["checkpoint", "KV cache", "right", "accuracy", "recovery", "denoise steps per block"]
    heading += ["weights, MB"]
    whole = by_contestant(rows)
    lines = []
    for name, result in whole.items():
        first = next(row for row in rows if row["contestant"] == name)
        low, high = (100 * end for end in wilson_interval(result.num_correct, result.num_questions))
        accuracy = 100 * result.num_correct / result.num_questions
        steps = result.steps_per_block / whole[BASELINE].steps_per_block
        recovered = "100 %"
        if name != BASELINE:
            recovered = "{:.1f} % [{:.1f} .. {:.1f}]".format(
                result.recovery, *result.recovery_interval
            )
        lines.append(
            [
                first["weights"],
                first["kv_cache"],
                f"{result.num_correct} / {result.num_questions}",
                f"{accuracy:.1f} % [{low:.1f} .. {high:.1f}]",
                recovered,
                f"{result.steps_per_block:.2f} ({100 * (steps - 1):+.1f} %)",
                f"{int(first['weight_bytes']) / 1e6:.2f}",
            ]
        )
    return heading, lines


def notes(rows: Sequence[Row]) -> list[str]:
    """What produced each score, a list item a contestant."""
    said = {row["contestant"]: row["computed_by"] for row in rows}
    return [f"* {name}: {computed_by}." for name, computed_by in said.items()]


def family_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Accuracy in per cent, a line for each family and a column for each contestant."""
    names = list(by_contestant(rows))
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        by_name = by_contestant([row for row in rows if row["family"] == family])
        cells = [f"{100 * one.num_correct / one.num_questions:.1f}" for one in by_name.values()]
        lines.append([family, *cells])
    return ["family", *names], lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Whether the targets are reached, one sentence each."""
    whole = by_contestant(rows)
    said = []
    for name, target in TARGETS.items():
        if name not in whole:
            continue
        recovered = whole[name].recovery
        moved = whole[name].steps_per_block / whole[BASELINE].steps_per_block - 1
        is_within = abs(moved) <= STEPS_TOLERANCE
        said.append(
            f"{name}: recovers {recovered:.1f} %, target {target:.0f} %: "
            f"{'reached' if recovered >= target else 'missed'}; steps per block {100 * moved:+.1f} "
            f"%, allowed {100 * STEPS_TOLERANCE:.0f} %: {'reached' if is_within else 'missed'}"
        )
    return said


def recovery(results: Path) -> str:
    """What quantized checkpoints keep of the answers, over all families and by family."""
    rows = read_csv(results / "recovery.csv")
    if not rows:
        return "Not measured yet: `python -m bench.recovery`."
    whole, by_family = markdown(*table(rows)), markdown(*family_table(rows))
    computed_by = "\n".join(["What computed each score:", "", *notes(rows)])
    return "\n\n".join([whole, computed_by, by_family, measured_with(rows, "recovery.csv")])
