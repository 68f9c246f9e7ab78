"""From what ``vllm bench serve`` saved to a table: numbers, checks, ratios, CSV.

Definitions, for one request at a time:

    canvas passes        forward passes that held a canvas, from the server's own counters: canvas
                         positions evaluated / canvas length. The built-in's commit passes are
                         among them, because it schedules a canvas for them.
    forward passes       canvas passes + one prefill pass a request (prompts fit into one chunk)
    denoise steps        canvas passes - commit passes. The built-in commits every block in a pass
                         of its own; ours commits inside the next block's first denoise step.
    ms per denoise step  sum of the requests' end-to-end latencies / denoise steps. Prefill, commit
                         passes, HTTP and detokenization are shared out over the denoise steps.
    ms per forward pass  the same sum / forward passes
    tokens/s             output tokens / wall time of the run, as ``vllm bench serve`` prints it

``vllm bench serve`` itself takes one commit pass a block off the canvas passes, which for ours
removes a denoise step; its ``diffusion_steps_per_canvas`` is therefore not used.
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.servers import Response

OURS = "ours"
BUILTIN = "built-in"


class GateError(RuntimeError):
    """Outputs were wrong, so there is no speed to report; the message says what was wrong."""


@dataclass(frozen=True)
class Workload:
    """What each run asks for.

    Attributes:
        num_prompts, input_len, output_len: requests of a run and their tokens.
        canvas_length: the checkpoint's.
        steps_per_block: what every block must take, or None where that is for the model to decide.
    """

    num_prompts: int
    input_len: int
    output_len: int
    canvas_length: int
    steps_per_block: int | None = None

    def __post_init__(self) -> None:
        if self.output_len % self.canvas_length:
            raise ValueError(
                f"--output-len {self.output_len} must be a multiple of the canvas length "
                f"{self.canvas_length}: a block that is cut costs as much as a whole one."
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of a run, all requests together."""
        return self.num_prompts * self.output_len // self.canvas_length


@dataclass(frozen=True)
class Measurement:
    """One run of ``vllm bench serve`` against one server."""

    server: str
    pair: int
    position: int  # 0: measured first in its pair
    tokens_per_s: float
    ttft_ms: float  # median over the requests
    latency_ms: float  # median over the requests, end to end
    ms_per_denoise_step: float
    ms_per_forward_pass: float
    steps_per_block: float
    passes_per_block: float  # canvas passes
    first_request_s: float  # the server's first request ever
    idle_cpu_percent: float  # of one core, used by the other server during this run


# Columns of the table: attribute, heading, decimals.
METRICS = (
    ("tokens_per_s", "output tokens/s", 1),
    ("ttft_ms", "time to first token, ms", 1),
    ("latency_ms", "end-to-end latency, ms", 1),
    ("ms_per_denoise_step", "ms per denoise step", 2),
    ("ms_per_forward_pass", "ms per forward pass", 2),
    ("steps_per_block", "denoise steps per block", 2),
    ("passes_per_block", "canvas passes per block", 2),
    ("first_request_s", "first request, s", 2),
    ("idle_cpu_percent", "CPU of the idle other, %", 1),
)
# Those that a ratio of ours to the built-in says something about.
COMPARED = {name for name, _, _ in METRICS} - {"first_request_s", "idle_cpu_percent"}


# --- the gate ------------------------------------------------------------------------------------


def response_problems(server: str, responses: Sequence[Response], num_tokens: int) -> list[str]:
    """What is wrong with answers that must have status 200 and exactly ``num_tokens`` tokens."""
    problems = []
    for response in responses:
        if response.status != 200:
            problems.append(f"{server}: HTTP {response.status} instead of 200: {response.error}")
        elif len(response.token_ids) != num_tokens:
            problems.append(f"{server}: {len(response.token_ids)} tokens instead of {num_tokens}")
    return problems


def seed_problems(server: str, first: Response, second: Response) -> list[str]:
    """What is wrong with the answers to two requests that were equal, seed included."""
    if first.token_ids == second.token_ids:
        return []
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    num_equal = sum(a == b for a, b in pairs)
    return [f"{server}: two equal requests with a seed agree in {num_equal} tokens only"]


def run_problems(server: str, saved: Mapping[str, Any], workload: Workload) -> list[str]:
    """What is wrong with a run: failed or short requests, or another number of denoise steps."""
    problems = []
    if saved["completed"] != workload.num_prompts or saved["failed"]:
        errors = sorted({error for error in saved.get("errors", []) if error})
        problems.append(
            f"{server}: {saved['completed']} of {workload.num_prompts} requests succeeded: {errors}"
        )
    short = [length for length in saved["output_lens"] if length != workload.output_len]
    if short:
        problems.append(f"{server}: {short} tokens instead of {workload.output_len}")
    if "diffusion_canvas_positions" not in saved:
        problems.append(f"{server}: no diffusion counters: is this a diffusion model?")
    elif workload.steps_per_block is not None:
        steps = denoise_steps(server, saved, workload) / workload.num_blocks
        if steps != workload.steps_per_block:
            problems.append(
                f"{server}: {steps:.3f} denoise steps per block instead of "
                f"{workload.steps_per_block}: the two servers did not do the same work"
            )
    return problems


# --- numbers -------------------------------------------------------------------------------------


def canvas_passes(saved: Mapping[str, Any], workload: Workload) -> float:
    """Forward passes that held a canvas, commit passes of the built-in included."""
    return float(saved["diffusion_canvas_positions"]) / workload.canvas_length


def denoise_steps(server: str, saved: Mapping[str, Any], workload: Workload) -> float:
    """Canvas passes without those that only committed a block."""
    num_commits = workload.num_blocks if server == BUILTIN else 0
    return canvas_passes(saved, workload) - num_commits


def measurement(
    server: str,
    saved: Mapping[str, Any],
    workload: Workload,
    *,
    pair: int,
    position: int,
    first_request_s: float,
    idle_cpu_percent: float,
) -> Measurement:
    """Read one saved result.

    Args:
        saved: the JSON that ``vllm bench serve --save-result --save-detailed`` wrote.
        idle_cpu_percent: of one core, used by the other server meanwhile.

    Raises:
        GateError: the run's outputs are wrong.
    """
    problems = run_problems(server, saved, workload)
    if problems:
        raise GateError("\n".join(problems))
    passes = canvas_passes(saved, workload)
    total_ms = 1e3 * sum(saved["latencies"])
    steps = denoise_steps(server, saved, workload)
    return Measurement(
        server=server,
        pair=pair,
        position=position,
        tokens_per_s=saved["output_throughput"],
        ttft_ms=1e3 * statistics.median(saved["ttfts"]),
        latency_ms=1e3 * statistics.median(saved["latencies"]),
        ms_per_denoise_step=total_ms / steps,
        ms_per_forward_pass=total_ms / (passes + workload.num_prompts),
        steps_per_block=steps / workload.num_blocks,
        passes_per_block=passes / workload.num_blocks,
        first_request_s=first_request_s,
        idle_cpu_percent=idle_cpu_percent,
    )


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a few values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, decimals: int) -> str:
        """``median [low .. high]``."""
        middle, low, high = (f"{value:.{decimals}f}" for value in asdict(self).values())
        return f"{middle} [{low} .. {high}]"


def pair_ratios(measurements: Sequence[Measurement], metric: str) -> list[float]:
    """Ours / built-in of each pair, in the order of the pairs."""
    pairs: dict[int, dict[str, float]] = {}
    for one in measurements:
        pairs.setdefault(one.pair, {})[one.server] = getattr(one, metric)
    return [pairs[pair][OURS] / pairs[pair][BUILTIN] for pair in sorted(pairs)]


# --- output --------------------------------------------------------------------------------------


def table(title: str, measurements: Sequence[Measurement]) -> str:
    """Medians with the smallest and largest value, and the ratios pair by pair."""
    rows: list[tuple[str, ...]] = [("", OURS, BUILTIN, f"{OURS} / {BUILTIN}")]
    for metric, heading, decimals in METRICS:
        cells = []
        for server in (OURS, BUILTIN):
            values = [getattr(one, metric) for one in measurements if one.server == server]
            cells.append(Spread.of(values).text(decimals))
        ratio = Spread.of(pair_ratios(measurements, metric)).text(3) if metric in COMPARED else ""
        rows.append((heading, *cells, ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class Context:
    """What a number means nothing without; the same on every row of a file.

    Attributes:
        mode: compiled or eager.
        schedule: fixed (every block takes as many denoise steps) or adaptive (the checkpoint's).
        command: the command line that produced the row.
    """

    mode: str
    schedule: str
    commit: str
    machine: str
    versions: str
    model: str
    command: str


def columns() -> list[str]:
    """Of the CSV, in order."""
    context = [field.name for field in fields(Context)]
    return ["mode", "schedule", *(f.name for f in fields(Measurement)), *context[2:]]


def write_csv(path: Path, rows: Sequence[tuple[Context, Measurement]]) -> None:
    """One line a measurement, replacing the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        for context, one in rows:
            numbers = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in asdict(one).items()
            }
            writer.writerow(asdict(context) | numbers)
