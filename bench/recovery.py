"""Scores of quantized checkpoints beside the bf16 one: the same questions to one server each.

    python -m bench.recovery                                   # quantizes checkpoints/tiny-dllm
    python -m bench.recovery --quantized /tmp/q --num 20       # /tmp/q/fp8-dynamic, /tmp/q/nvfp4

Writes ``bench/results/recovery.csv``, a row for each contestant, seed and family, and prints the
table of docs/quantization.md. A seed draws the questions and the noise of their canvases, the same
for all contestants. Each score names what computed it.

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

from bench.context import RESULTS, ROOT, Rows, as_text, provenance, read_csv, write_csv
from bench.servers import SERVE_FLAGS, Server, ServerOptions
from bench.tables import Table, markdown, measured_with
from dllm.tasks.suite import Question, questions
from dllm.tools.client import connect
from dllm.tools.eval_report import Run, wilson_interval
from dllm.tools.eval_server import ServedModel
from dllm.tools.evaluate import ALL, chosen_families

SCHEMES = ("fp8-dynamic", "nvfp4")
MAX_TOKENS = 128
CONCURRENCY = 8
BASELINE = "bf16"
RESAMPLES = 10_000
# The line of ``dllm.models.quantized`` in a server's log.
SAID = re.compile(r"dllm: [\w-]+ checkpoint; (.*)")

# (seed, family) -> questions, or the answers to them.
Asked = Mapping[tuple[int, str], list[Question]]
Answered = dict[tuple[int, str], Run]


@dataclass(frozen=True)
class Contestant:
    """One server: how weights, keys and values are stored, and flags beside those of all."""

    weights: str
    kv_cache: str
    path: Path
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In the CSV."""
        return self.weights + f", {self.kv_cache} KV" * (self.kv_cache != BASELINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contestants, write the CSV, print the table."""
    given = parse(arguments)
    asked = {
        (seed, family): questions([family], "heldout", given.num, seed)
        for seed in given.seeds
        for family in chosen_families(given.tasks)
    }
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        quantized = given.quantized or quantize(given.model, Path(folder))
        baseline: Answered = {}
        for contestant in contestants(given.model, quantized):
            answered, computed_by = measure(contestant, asked, tuple(given.flags.split()))
            baseline = baseline or answered
            rows += rows_of(contestant, computed_by, asked, answered, baseline)
            write_csv(given.output, [row | provenance("bench.recovery") for row in rows])
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
    parser.add_argument("--output", type=Path, default=RESULTS / "recovery.csv")
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


def measure(contestant: Contestant, asked: Asked, flags: tuple[str, ...]) -> tuple[Answered, str]:
    """Ask a server of its own everything; returns the answers and what computed them."""
    name = re.sub(r"\W+", "-", contestant.name)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{name}.log"
        all_flags = (*SERVE_FLAGS, *contestant.flags, *flags)
        with Server(ServerOptions(name, str(contestant.path), all_flags), log) as server:
            server.start()
            server.wait_until_ready()
            answered = ask(server.url, asked, contestant.name)
        return answered, what_computed(log.read_text(errors="replace"))


def ask(url: str, asked: Asked, name: str) -> Answered:
    """Every question to the server at ``url``; question i is sent with the seed plus i."""
    connection = connect(url, None)
    answered: Answered = {}
    for (seed, family), drawn in asked.items():
        model = ServedModel(connection, MAX_TOKENS, CONCURRENCY, seed=seed)
        answered[seed, family] = model.answer(drawn, lambda: None)
        right = sum(
            question.is_correct(answer.text)
            for question, answer in zip(drawn, answered[seed, family].answers, strict=True)
        )
        print(f"{name}, seed {seed}, {family}: {right} of {len(drawn)} right", flush=True)
    return answered


def what_computed(log: str) -> str:
    """What a server's log says about its quantized layers; plain layers it does not mention."""
    said = SAID.search(log)
    return said[1] if said else "16-bit weights and inputs, by vLLM's own kernels"


def rows_of(
    contestant: Contestant, computed_by: str, asked: Asked, answered: Answered, baseline: Answered
) -> list[dict[str, object]]:
    """A row for each seed and family."""
    rows = []
    if contestant.kv_cache != BASELINE:
        computed_by += f"; keys and values in {contestant.kv_cache}"
    weight_bytes = sum(file.stat().st_size for file in contestant.path.glob("*.safetensors"))
    for cell, drawn in asked.items():
        right, baseline_right = (
            [q.is_correct(a.text) for q, a in zip(drawn, run[cell].answers, strict=True)]
            for run in (answered, baseline)
        )
        rows.append(
            {
                "contestant": contestant.name,
                "weights": contestant.weights,
                "kv_cache": contestant.kv_cache,
                "seed": cell[0],
                "family": cell[1],
                "num_questions": len(drawn),
                "num_correct": sum(right),
                "num_baseline": sum(baseline_right),
                "num_both": sum(a and b for a, b in zip(right, baseline_right, strict=True)),
                "steps": answered[cell].denoise_steps,
                "blocks": answered[cell].blocks,
                "weight_bytes": weight_bytes,
                "computed_by": computed_by,
            }
        )
    return rows


# --- arithmetic and tables -----------------------------------------------------------------------


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
    def of(cls, rows: Rows) -> "Result":
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
            right - self.num_both for right in (self.num_correct, self.num_baseline)
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


def by_contestant(rows: Rows) -> dict[str, Result]:
    """Each contestant's sum, in the order of the rows."""
    names = dict.fromkeys(row["contestant"] for row in rows)
    return {name: Result.of([row for row in rows if row["contestant"] == name]) for name in names}


def table(rows: Rows) -> Table:
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


def notes(rows: Rows) -> list[str]:
    """What produced each score, a list item a contestant."""
    said = {row["contestant"]: row["computed_by"] for row in rows}
    return [f"* {name}: {computed_by}." for name, computed_by in said.items()]


def described(rows: Rows) -> str:
    """The table, and what computed each score."""
    return "\n".join([markdown(table(rows)), "", "What computed each score:", "", *notes(rows)])


def recovery(results: Path) -> str:
    """Section of docs/quantization.md: what quantized checkpoints keep of the answers."""
    rows = read_csv(results / "recovery.csv")
    if not rows:
        return "Not measured yet: `python -m bench.recovery`."
    return f"{described(rows)}\n\n{measured_with(rows, 'recovery.csv')}"


if __name__ == "__main__":
    sys.exit(main())
