"""Scores of quantized checkpoints beside the bf16 one: the same questions to one server each.

    python -m bench.recovery                                   # quantizes checkpoints/tiny-dllm
    python -m bench.recovery --quantized /tmp/q --num 20       # /tmp/q/fp8-dynamic, /tmp/q/nvfp4

Writes ``bench/results/recovery.csv``, a row for each contestant, seed and family, and prints the
tables of the README. A seed draws the questions and is the noise of their canvases, the same for
all contestants. Each score names what computed it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.command import SERVE_FLAGS
from bench.context import RESULTS, ROOT, provenance, write_csv
from bench.recovery_report import BASELINE, recovery, verdicts
from bench.servers import Server, ServerOptions
from dllm.tasks.suite import Question, questions
from dllm.tools.client import connect
from dllm.tools.eval_report import Run
from dllm.tools.eval_server import ServedModel
from dllm.tools.evaluate import ALL, chosen_families

SCHEMES = ("fp8-dynamic", "nvfp4")
MAX_TOKENS = 128
CONCURRENCY = 8
# The line of ``dllm.models.quantized`` in a server's log.
SAID = re.compile(r"dllm: [\w-]+ checkpoint; (.*)")

# (seed, family) -> questions, or the answers to them.
Asked = Mapping[tuple[int, str], list[Question]]
Answered = dict[tuple[int, str], Run]


@dataclass(frozen=True)
class Contestant:
    """One server.

    Attributes:
        name: in the CSV; ``BASELINE`` is what the others are compared with.
        weights: how they are stored.
        kv_cache: how keys and values are.
        path: of the checkpoint.
        flags: of ``vllm serve``, beside those of all.
    """

    name: str
    weights: str
    kv_cache: str
    path: Path
    flags: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contestants, write the CSV, print the tables."""
    given = parse(arguments)
    families = chosen_families(given.tasks)
    asked = {
        (seed, family): questions([family], "heldout", given.num, seed)
        for seed in given.seeds
        for family in families
    }
    folder = tempfile.TemporaryDirectory() if given.quantized is None else None
    with folder or nullcontext():
        quantized = Path(folder.name) if folder else given.quantized
        if folder:
            quantize(given.model, quantized)
        rows: list[dict[str, object]] = []
        baseline: Answered = {}
        for contestant in contestants(given.model, quantized):
            answered, computed_by = measure(contestant, asked, tuple(given.flags.split()))
            baseline = baseline or answered
            rows += rows_of(contestant, computed_by, asked, answered, baseline)
            write_csv(given.output, [row | provenance("bench.recovery") for row in rows])
    print(recovery(given.output.parent))
    print("\n".join(verdicts([{key: str(cell) for key, cell in row.items()} for row in rows])))
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
    """The baseline first."""
    fp8_cache = ("--kv-cache-dtype", "fp8")
    return [
        Contestant(BASELINE, "bf16", "bf16", model),
        Contestant(f"{BASELINE}, fp8 KV", "bf16", "fp8", model, fp8_cache),
        *(Contestant(scheme, scheme, "bf16", quantized / scheme) for scheme in SCHEMES),
    ]


def quantize(model: Path, target: Path) -> None:
    """Make every quantized checkpoint with the command that users have."""
    for scheme in SCHEMES:
        command = [sys.executable, "-m", "dllm.cli", "quantize", str(model)]
        command += ["--scheme", scheme, "--out", str(target / scheme)]
        subprocess.run(command, check=True, cwd=ROOT)


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
    """Every question to the server at ``url``; the seed of question i is the cell's plus i."""
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


if __name__ == "__main__":
    sys.exit(main())
