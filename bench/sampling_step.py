"""Times the sampling step, ours beside vLLM's built-in one, on the same logits in one run.

    python -m bench.sampling_step                      # the shapes of the table, this device
    python -m bench.sampling_step --rows 256 --vocab 262144 --hidden 2816 --profiles settled
    python -m bench.sampling_step --smoke              # tiny shapes, seconds

The order is A B, B A, A B, ..., so that a machine that gets slower or faster does so to both, and
a ratio is one of neighbours. Before anything is timed the two must agree: the same argmax, the same
entropies, and soft embeddings no further apart than `dllm.ops.soft_embedding` allows plus bf16
rounding; otherwise there is no number and the exit code is 1. Without vLLM only ours is timed.

Ours comes twice, with the sparse soft embedding (the default on a CPU) and with the exact product.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.context import RESULTS, provenance, read_csv, write_csv
from bench.sampling_peers import (
    Outcome,
    Shape,
    import_builtin,
    make_embeddings,
    make_logits,
    prepare_builtin,
    prepare_ours,
)
from bench.tables import Spread, markdown, measured_with
from dllm.ops.soft_embedding import skipped_mass

BUILTIN, SPARSE, EXACT = "built-in", "ours, sparse", "ours, exact"
ENTROPY_TOLERANCE = 1e-3  # nats: the built-in sums p log p over the whole row in fp32


@dataclass(frozen=True)
class Timing:
    """One line of the CSV: one implementation on one shape; times in ms."""

    rows: int
    vocab_size: int
    hidden: int
    profile: str
    implementation: str
    p50_ms: float
    faster_than_builtin: float | None  # median of the ratios of neighbours
    faster_low: float | None
    faster_high: float | None
    largest_soft_error: float | None  # in units of the largest embedding norm


def disagreement(ours: Outcome, builtin: Outcome, weight: Tensor) -> tuple[str, float]:
    """What is wrong, or nothing; and the largest distance of two soft embeddings."""
    largest = float(weight.float().norm(dim=-1).max())
    error = float((ours.soft - builtin.soft).norm(dim=-1).max()) / largest
    unit = torch.finfo(weight.dtype).eps / 2
    # Each rounds probabilities and result; ours leaves out its budget.
    bound = skipped_mass(weight.dtype) + 4 * unit
    if not torch.equal(ours.argmax, builtin.argmax):
        return "other argmax tokens", error
    worst = float((ours.entropy - builtin.entropy).abs().max())
    if not worst < ENTROPY_TOLERANCE:
        return f"entropies are {worst:.2g} apart", error
    if not error <= bound:
        return f"soft embeddings are {error:.2g} apart, allowed {bound:.2g}", error
    return "", error


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall time of one call, to the end of what it started."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each step in each round; every other round runs in the opposite order."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        names = list(steps) if index % 2 == 0 else list(steps)[::-1]
        for name in names:
            times[name].append(seconds(steps[name], device))
    return times


def measure(shape: Shape, rounds: int, device: str, is_compiled: bool) -> list[Timing]:
    """Check, then time. Raises RuntimeError if ours and the built-in disagree."""
    logits, weight = make_logits(shape, device), make_embeddings(shape, device)
    prepared = {
        SPARSE: prepare_ours(shape, weight, False, is_compiled),
        EXACT: prepare_ours(shape, weight, True, is_compiled),
    }
    errors: dict[str, float | None] = dict.fromkeys(prepared)
    try:
        import_builtin()
    except ImportError as error:
        print(f"no built-in to compare with: {error}", file=sys.stderr)
    else:
        prepared[BUILTIN] = prepare_builtin(shape, weight)
        expected = prepared[BUILTIN](logits)
        for name in (SPARSE, EXACT):
            problem, errors[name] = disagreement(prepared[name](logits), expected, weight)
            if problem:
                raise RuntimeError(f"{name}, {shape}: {problem}")
    steps = {name: lambda step=step: step(logits) for name, step in prepared.items()}
    alternate(steps, 1, device)  # compiles
    times = alternate(steps, rounds, device)
    return [_timing(shape, name, times, errors.get(name)) for name in steps]


def _timing(
    shape: Shape,
    name: str,
    times: dict[str, list[float]],
    error: float | None,
) -> Timing:
    ratios = [b / a for a, b in zip(times[name], times.get(BUILTIN, []), strict=False)]
    faster = Spread.of(ratios) if ratios else None
    return Timing(
        rows=shape.num_rows,
        vocab_size=shape.vocab_size,
        hidden=shape.hidden,
        profile=shape.profile,
        implementation=name,
        p50_ms=1e3 * statistics.median(times[name]),
        faster_than_builtin=faster.median if faster else None,
        faster_low=faster.low if faster else None,
        faster_high=faster.high if faster else None,
        largest_soft_error=error,
    )


def show(timing: Timing) -> None:
    """One line for a human."""
    ratio = timing.faster_than_builtin
    text = (
        ""
        if ratio is None
        else f"  x{ratio:.2f} [{timing.faster_low:.2f} .. {timing.faster_high:.2f}]"
    )
    print(
        f"{timing.rows:5} rows, vocabulary {timing.vocab_size:7}, hidden {timing.hidden:5}, "
        f"{timing.profile:8} {timing.implementation:13} {timing.p50_ms:10.1f} ms{text}",
        flush=True,
    )


def sampling_step(results: Path) -> str:
    """Section of docs/sampling.md: milliseconds and ratios, a line for each shape and profile."""
    rows = read_csv(results / "sampling_step_cpu.csv")
    if not rows:
        return "Not measured yet: `python -m bench.sampling_step`."
    shape_of = ("rows", "vocab_size", "hidden", "profile")
    lines = []
    for shape in dict.fromkeys(tuple(row[name] for name in shape_of) for row in rows):
        here = [row for row in rows if tuple(row[name] for name in shape_of) == shape]
        times = [f"{float(row['p50_ms']):.1f}" for row in here]
        faster = [
            Spread(*(float(row[f"faster_{end}"]) for end in ("than_builtin", "low", "high")))
            for row in here
            if row["implementation"].startswith("ours") and row["faster_than_builtin"]
        ]
        num_rows, vocab_size, *rest = shape
        cells = [num_rows, f"{int(vocab_size):,}", *rest, " / ".join(times)]
        lines.append(cells + [one.text(2) for one in faster])
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    compared = [f"built-in / {name}" for name in names if name.startswith("ours")]
    header = ["rows", "vocabulary", "hidden", "logits", f"ms: {' / '.join(names)}", *compared]
    return f"{markdown((header, lines))}\n\n{measured_with(rows, 'sampling_step_cpu.csv')}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=[64, 256])
    parser.add_argument("--vocab", type=numbers, default=[32_768, 262_144])
    parser.add_argument("--hidden", type=numbers, default=[256, 2816])
    parser.add_argument("--profiles", default="open,half,settled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="ours without torch.compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.vocab, options.hidden, options.rounds = [8], [9000], [16], 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the CSV after every shape."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = provenance("bench.sampling_step")
    timings: list[Timing] = []
    axes = (options.vocab, options.hidden, options.rows, options.profiles.split(","))
    for vocab_size, hidden, rows, profile in itertools.product(*axes):
        shape = Shape(2, rows // 2, vocab_size, hidden, profile)
        try:
            new = measure(shape, options.rounds, device, not options.eager)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        for timing in new:
            show(timing)
        timings += new
        path = options.results / f"sampling_step_{device}.csv"
        write_csv(path, [asdict(timing) | about for timing in timings])
    return 0


if __name__ == "__main__":
    sys.exit(main())
