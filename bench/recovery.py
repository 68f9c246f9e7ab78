"""Scores of quantized checkpoints beside the bf16 one: `dllm eval` of one server after the other.

    python -m bench.recovery                                   # quantizes checkpoints/tiny-dllm
    python -m bench.recovery --quantized /tmp/q --num 20       # /tmp/q/fp8-dynamic, /tmp/q/nvfp4

Writes ``bench/results/recovery.csv``, a row for each contestant, and prints the table of
docs/quantization.md. A seed draws questions and the noise of their canvases, the same for all
contestants. Each score names what computed it.

    recovery    right answers / right answers of the bf16 checkpoint to the same questions
    interval    95%, by resampling questions with both of their answers (paired bootstrap)
    steps       denoise steps / blocks, and that over the bf16 checkpoint's
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.context import ROOT, Row, Rows, command_line, publish, reporting_failures
from bench.servers import SERVE_FLAGS, Server
from bench.tables import Section, markdown
from dllm.tools import evaluate
from dllm.tools.eval_report import wilson_interval

SCHEMES = ("fp8-dynamic", "nvfp4")
BASELINE = "bf16"
RESAMPLES = 10_000
# The line of ``dllm.models.quantized`` in a server's log.
SAID = re.compile(r"dllm: [\w-]+ checkpoint; (.*)")


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contestants, write the CSV, print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument(
        "--quantized",
        type=Path,
        metavar="DIR",
        help=f"folder with {' and '.join(SCHEMES)}; default: made with `dllm quantize`",
    )
    parser.add_argument("--tasks", default=evaluate.ALL, help="as of `dllm eval`")
    parser.add_argument("--num", type=int, default=100, help="questions a family and seed (100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--flags", default="", help="more flags of `vllm serve`, for all servers")
    given = parser.parse_args(arguments)
    evaluate.chosen_families(given.tasks)  # or says which there are
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        quantized = given.quantized or quantize(given.model, Path(folder))
        contestants = [(BASELINE, BASELINE, given.model), (BASELINE, "fp8", given.model)]
        contestants += [(scheme, BASELINE, quantized / scheme) for scheme in SCHEMES]
        wrong: list[set[tuple[int, str, int]]] = []
        for weights, kv_cache, path in contestants:
            row, missed = measure(weights, kv_cache, path, given, Path(folder))
            wrong.append(missed)
            asked = row["num_questions"]
            both = asked - len(missed | wrong[0])
            rows.append(row | {"num_baseline": asked - len(wrong[0]), "num_both": both})
            publish(given.results / SECTION.file, rows)
    print(SECTION(given.results))
    return 0


def quantize(model: Path, target: Path) -> Path:
    """Make every quantized checkpoint with the command that users have; returns ``target``."""
    for scheme in SCHEMES:
        command = [sys.executable, "-m", "dllm.cli", "quantize", str(model)]
        command += ["--scheme", scheme, "--out", str(target / scheme)]
        subprocess.run(command, check=True, cwd=ROOT)
    return target


def measure(
    weights: str, kv_cache: str, path: Path, given: argparse.Namespace, folder: Path
) -> tuple[Row, set[tuple[int, str, int]]]:
    """A server's row of the CSV without the comparison, and what it got wrong.

    Args:
        weights, kv_cache: how weights, and keys and values, are stored.

    Returns:
        The row, and seed, family and place of each question that was answered wrongly.
    """
    name, report = f"{weights}-{kv_cache}", folder / "eval.json"
    flags = () if kv_cache == BASELINE else ("--kv-cache-dtype", kv_cache)
    flags = (*SERVE_FLAGS, *flags, *given.flags.split())
    missed: set[tuple[int, str, int]] = set()
    counted = ("num_questions", "num_correct", "denoise_steps", "blocks")
    sums = dict.fromkeys(counted, 0)
    with Server(name, str(path), folder / f"{name}.log", flags) as server:
        server.wait_until_ready()
        for seed in given.seeds:
            asked = ["--tasks", given.tasks, "--num", str(given.num), "--question-seed", str(seed)]
            asked += ["--seed", str(seed), "--output", str(report), "--base-url", server.url]
            evaluate.main(asked)
            found = json.loads(report.read_text())
            missed |= {(seed, one["family"], one["place"]) for one in found["wrong"]}
            sums = {key: sums[key] + (found["all"][key] or 0) for key in counted}
        said = SAID.search(server.log.read_text(errors="replace"))
    computed_by = said[1] if said else "16-bit weights and inputs, by vLLM's own kernels"
    if kv_cache != BASELINE:
        computed_by += f"; keys and values in {kv_cache}"
    sums["steps"] = sums.pop("denoise_steps")
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    row: Row = {"weights": weights, "kv_cache": kv_cache, **sums, "weight_bytes": num_bytes}
    return row | {"computed_by": computed_by}, missed


# --- arithmetic and tables -----------------------------------------------------------------------


def recovery_interval(asked: int, right: int, baseline: int, both: int) -> tuple[float, float]:
    """95%, in per cent of the baseline's right answers.

    A question is right for both, for one of the two, or for neither.

    Args:
        asked, right, baseline, both: questions: all, answered right, by the baseline, by both.
    """
    counts = np.array([both, right - both, baseline - both, asked - right - baseline + both])
    draws = np.random.default_rng(0).multinomial(asked, counts / asked, size=RESAMPLES)
    drawn_right, drawn_baseline = draws[:, 0] + draws[:, 1], draws[:, 0] + draws[:, 2]
    low, high = np.percentile(100 * drawn_right / np.maximum(drawn_baseline, 1), [2.5, 97.5])
    return float(low), float(high)


def steps_per_block(row: Mapping[str, str]) -> float:
    """NaN where the server counts no denoise steps."""
    return int(row["steps"]) / int(row["blocks"]) if int(row["blocks"]) else float("nan")


def table(rows: Rows) -> str:
    """One line a contestant, the first of which is the baseline; then what computed each score."""
    heading = ["checkpoint", "KV cache", "right", "accuracy", "recovery", "denoise steps per block"]
    lines, notes = [], []
    for row in rows:
        columns = ("num_questions", "num_correct", "num_baseline", "num_both")
        asked, right, baseline, both = (int(row[column]) for column in columns)
        low, high = (100 * end for end in wilson_interval(right, asked))
        recovered = "100 %"
        if row is not rows[0]:
            ends = recovery_interval(asked, right, baseline, both)
            share = 100 * right / baseline if baseline else float("nan")
            recovered = "{:.1f} % [{:.1f} .. {:.1f}]".format(share, *ends)
        slower = steps_per_block(row) / steps_per_block(rows[0]) - 1
        accuracy = f"{100 * right / asked:.1f} % [{low:.1f} .. {high:.1f}]"
        line = [row["weights"], row["kv_cache"], f"{right} / {asked}", accuracy, recovered]
        line.append(f"{steps_per_block(row):.2f} ({100 * slower:+.1f} %)")
        lines.append([*line, f"{int(row['weight_bytes']) / 1e6:.2f}"])
        name = row["weights"] + f", {row['kv_cache']} KV" * (row["kv_cache"] != BASELINE)
        notes.append(f"* {name}: {row['computed_by']}.")
    shown = markdown([*heading, "weights, MB"], lines)
    return "\n".join([shown, "", "What computed each score:", "", *notes])


SECTION = Section("recovery.csv", "python -m bench.recovery", table)  # of docs/quantization.md


if __name__ == "__main__":
    sys.exit(main())
