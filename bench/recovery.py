"""Scores of quantized checkpoints beside the bf16 one: the same questions to one server each.

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
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.context import (
    RESULTS,
    ROOT,
    Rows,
    as_text,
    provenance,
    reporting_failures,
    write_csv,
)
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import Table, markdown, section
from dllm.tasks.suite import Question, questions
from dllm.tools.client import connect
from dllm.tools.eval_report import wilson_interval
from dllm.tools.eval_server import ServedModel
from dllm.tools.evaluate import ALL, chosen_families

SCHEMES = ("fp8-dynamic", "nvfp4")
MAX_TOKENS = 128
CONCURRENCY = 8
BASELINE = "bf16"
RESAMPLES = 10_000
# The line of ``dllm.models.quantized`` in a server's log.
SAID = re.compile(r"dllm: [\w-]+ checkpoint; (.*)")

Asked = Mapping[int, list[Question]]  # by seed


@dataclass(frozen=True)
class Contestant:
    """One server: how weights, keys and values are stored, and flags beside those of all."""

    weights: str
    kv_cache: str
    path: Path
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answered:
    """What a contestant made of all questions: which it got right, and what computed that."""

    is_right: list[bool]
    denoise_steps: int
    blocks: int
    computed_by: str


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contestants, write the CSV, print the table."""
    given = parse(arguments)
    families = chosen_families(given.tasks)
    asked = {seed: questions(families, "heldout", given.num, seed) for seed in given.seeds}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        quantized = given.quantized or quantize(given.model, Path(folder))
        baseline: Answered | None = None
        for contestant in contestants(given.model, quantized):
            answered = measure(contestant, asked, tuple(given.flags.split()))
            baseline = baseline or answered
            rows.append(row_of(contestant, answered, baseline))
            write_csv(
                given.results / "recovery.csv", [row | provenance("bench.recovery") for row in rows]
            )
    print(described(as_text(rows)))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny-dllm")
    parser.add_argument(
        "--quantized",
        type=Path,
        metavar="DIR",
        help=f"folder with {' and '.join(SCHEMES)}; default: made with `dllm quantize`",
    )
    parser.add_argument("--tasks", default=ALL, help="as of `dllm eval`")
    parser.add_argument("--num", type=int, default=100, help="questions a family and seed (100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--flags", default="", help="more flags of `vllm serve`, for all servers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    return parser.parse_args(arguments)


def contestants(model: Path, quantized: Path) -> list[Contestant]:
    """The baseline first: what the others are compared with."""
    return [
        Contestant(BASELINE, BASELINE, model),
        Contestant(BASELINE, "fp8", model, ("--kv-cache-dtype", "fp8")),
        *(Contestant(scheme, BASELINE, quantized / scheme) for scheme in SCHEMES),
    ]


def quantize(model: Path, target: Path) -> Path:
    """Make every quantized checkpoint with the command that users have; returns ``target``."""
    for scheme in SCHEMES:
        command = [sys.executable, "-m", "dllm.cli", "quantize", str(model)]
        command += ["--scheme", scheme, "--out", str(target / scheme)]
        subprocess.run(command, check=True, cwd=ROOT)
    return target


def measure(contestant: Contestant, asked: Asked, flags: tuple[str, ...]) -> Answered:
    """Ask a server of its own everything; question i of a seed is sent with the seed plus i."""
    name = f"{contestant.weights}-{contestant.kv_cache}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{name}.log"
        all_flags = (*SERVE_FLAGS, *contestant.flags, *flags)
        is_right: list[bool] = []
        steps = blocks = 0
        with Server(ServerOptions(name, str(contestant.path), all_flags), log) as server:
            server.start()
            server.wait_until_ready()
            connection = connect(server.url, None)
            for seed, drawn in asked.items():
                model = ServedModel(connection, MAX_TOKENS, CONCURRENCY, seed=seed)
                run = model.answer(drawn, lambda: None)
                right = [q.is_correct(a.text) for q, a in zip(drawn, run.answers, strict=True)]
                print(f"{name}, seed {seed}: {sum(right)} of {len(right)} right", flush=True)
                is_right += right
                steps += run.denoise_steps or 0
                blocks += run.blocks or 0
        computed_by = what_computed(log.read_text(errors="replace"))
    if contestant.kv_cache != BASELINE:
        computed_by += f"; keys and values in {contestant.kv_cache}"
    return Answered(is_right, steps, blocks, computed_by)


def what_computed(log: str) -> str:
    """What a server's log says about its quantized layers; plain layers it does not mention."""
    said = SAID.search(log)
    return said[1] if said else "16-bit weights and inputs, by vLLM's own kernels"


def row_of(contestant: Contestant, answered: Answered, baseline: Answered) -> dict[str, object]:
    """A contestant's row of the CSV."""
    pairs = list(zip(answered.is_right, baseline.is_right, strict=True))
    return {
        "weights": contestant.weights,
        "kv_cache": contestant.kv_cache,
        "num_questions": len(pairs),
        "num_correct": sum(answered.is_right),
        "num_baseline": sum(baseline.is_right),
        "num_both": sum(one and other for one, other in pairs),
        "steps": answered.denoise_steps,
        "blocks": answered.blocks,
        "weight_bytes": sum(f.stat().st_size for f in contestant.path.glob("*.safetensors")),
        "computed_by": answered.computed_by,
    }


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


def table(rows: Rows) -> Table:
    """Heading and one line a contestant; the first is the baseline."""
    heading = ["checkpoint", "KV cache", "right", "accuracy", "recovery", "denoise steps per block"]
    heading += ["weights, MB"]
    lines = []
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
        lines.append(
            [
                row["weights"],
                row["kv_cache"],
                f"{right} / {asked}",
                f"{100 * right / asked:.1f} % [{low:.1f} .. {high:.1f}]",
                recovered,
                f"{steps_per_block(row):.2f} ({100 * slower:+.1f} %)",
                f"{int(row['weight_bytes']) / 1e6:.2f}",
            ]
        )
    return heading, lines


def steps_per_block(row: Mapping[str, str]) -> float:
    """NaN where the server counts no denoise steps."""
    return int(row["steps"]) / int(row["blocks"]) if int(row["blocks"]) else float("nan")


def described(rows: Rows) -> str:
    """The table, and what computed each score."""
    notes = []
    for row in rows:
        name = row["weights"] + f", {row['kv_cache']} KV" * (row["kv_cache"] != BASELINE)
        notes.append(f"* {name}: {row['computed_by']}.")
    return "\n".join([markdown(table(rows)), "", "What computed each score:", "", *notes])


def recovery(results: Path) -> str:
    """Section of docs/quantization.md: what quantized checkpoints keep of the answers."""
    return section(results / "recovery.csv", "python -m bench.recovery", described)


if __name__ == "__main__":
    sys.exit(main())
