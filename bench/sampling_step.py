"""Times the sampling step, ours beside vLLM's built-in one, on the same logits in one run.

    python -m bench.sampling_step                      # the shapes of the table, this device
    python -m bench.sampling_step --rows 256 --vocab 262144 --hidden 2816 --profiles settled
    python -m bench.sampling_step --smoke              # tiny shapes, seconds

The sampling step is everything between the logits of the canvas rows and the next canvas: row
statistics and the draw, accept, renoise and stop, the soft embeddings for the next step. Ours is
the denoise step that the server calls, once with the sparse soft embedding (the default on a CPU)
and once with the exact product. The built-in's are its own two functions with the state tensors
that its sampler gives them, compiled as it compiles them.

The order is A B, B A, A B, ..., so that a machine that gets slower or faster does so to both, and
a ratio is one of neighbours. Before anything is timed the two must agree: the same argmax, the same
entropies, and soft embeddings no further apart than `dllm.ops.soft_embedding` allows plus bf16
rounding; otherwise there is no number and the exit code is 1. Without vLLM only ours is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from bench.context import RESULTS, Rows, provenance, write_csv
from bench.tables import Spread, markdown, section
from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.step import denoise, first_canvases
from dllm.ops.dispatch import sparse_product
from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass

BUILTIN, SPARSE, EXACT = "built-in", "ours, sparse", "ours, exact"
PROFILES = ("open", "half", "settled")  # of `make_logits`
ENTROPY_TOLERANCE = 1e-3  # nats: the built-in sums p log p over the whole row in fp32
T_MIN, T_MAX, MAX_STEPS, ENTROPY_BOUND, CONFIDENCE, WINDOW = 0.4, 0.8, 48, 0.1, 0.005, 2
SEED = 5


@dataclass(frozen=True)
class Shape:
    """R canvases of C tokens; a vocabulary; the hidden size of the embeddings, in bf16."""

    num_canvases: int
    canvas_length: int
    vocab_size: int
    hidden: int
    profile: str

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_canvases * self.canvas_length


class Outcome(NamedTuple):
    """What both have to agree on."""

    argmax: Tensor  # [N]
    entropy: Tensor  # [N]
    soft: Tensor  # [N, hidden] fp32, not yet scaled by sqrt(hidden)


def make_logits(shape: Shape, device: str) -> Tensor:
    """Made-up logits, [N, V] fp32.

    `open`: normal with a deviation of 3, as at a first step: thousands of tokens of a row have a
    probability that matters. `settled`: a normal bulk around -8 with a deviation of 2.5, 20 tokens
    around 8 and one at 22: at the schedule's temperatures few tokens matter. `half`: half of the
    rows are open, the others settled.
    """
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.num_rows, shape.vocab_size)
    logits = torch.empty(size, device=device).normal_(generator=generator)
    which = {"open": slice(0), "half": slice(0, None, 2), "settled": slice(None)}[shape.profile]
    settled = logits.mul_(3)[which]
    settled.mul_(2.5 / 3).sub_(8)
    chosen = (len(settled), 21)
    ids = torch.randint(shape.vocab_size, chosen, generator=generator, device=device)
    high = 8 + 2 * torch.randn(chosen, generator=generator, device=device)
    settled.scatter_(1, ids, high)
    settled.scatter_(1, ids[:, :1], 22)
    return logits


@functools.lru_cache(maxsize=1)  # the same for all measurements that differ in logits
def make_embeddings(vocab_size: int, hidden: int, device: str) -> Tensor:
    """[V, hidden] bf16, with rows of norm about 1."""
    generator = torch.Generator(device).manual_seed(1)
    values = torch.empty(vocab_size, hidden, dtype=torch.bfloat16, device=device)
    return values.normal_(std=hidden**-0.5, generator=generator)


def prepare_ours(
    shape: Shape, weight: Tensor, is_exact: bool, is_compiled: bool
) -> Callable[[Tensor], Outcome]:
    """Our step on logits [N, V], in the middle of the schedule."""
    settings = GemmaSettings(
        canvas_length=shape.canvas_length,
        max_denoising_steps=MAX_STEPS,
        t_min=T_MIN,
        t_max=T_MAX,
        entropy_bound=ENTROPY_BOUND,
        confidence_threshold=CONFIDENCE,
        stability_threshold=WINDOW - 1,
        canvas_window="symmetric",
    )
    starts = torch.zeros(shape.num_canvases, dtype=torch.int64, device=weight.device)
    rows = CanvasRows.whole(starts, shape.canvas_length)
    canvases = first_canvases(starts + SEED, starts, settings, [1], shape.vocab_size)
    canvases = canvases._replace(steps_done=torch.full_like(starts, MAX_STEPS // 2))
    shard, budget = Shard(weight, 0, shape.vocab_size), skipped_mass(weight.dtype)
    probs_dtype = torch.bfloat16 if is_exact else None
    decide = torch.compile(denoise, dynamic=True) if is_compiled else denoise

    def step(logits: Tensor) -> Outcome:
        denoised = decide(logits, rows, canvases, settings, probs_dtype)
        stats = denoised.stats
        if stats.probs is None:
            soft = sparse_product(logits, denoised.temperature, stats, shard, budget)
        else:
            soft = exact_product(stats.probs, shard)
        return Outcome(stats.argmax, stats.entropy, soft.float())

    return step


@functools.cache
def import_builtin() -> ModuleType:
    """vLLM's module. Raises ImportError where there is no vLLM of 0.32."""
    from dllm.patches.builtin import builtin

    return builtin


def prepare_builtin(shape: Shape, weight: Tensor) -> Callable[[Tensor], Outcome]:
    """The built-in's step on logits [N, V]: `DiffusionSampler.__call__` from its tile on."""
    builtin = import_builtin()
    count, length, device = shape.num_canvases, shape.canvas_length, weight.device
    states = builtin.DiffusionGemmaRequestStates(
        count, length, shape.vocab_size, MAX_STEPS, device, shape.hidden, WINDOW
    )
    slots = torch.arange(count, device=device)
    widths = torch.full((count,), length, device=device)
    sampled = torch.zeros(count, length, dtype=torch.int32, device=device)
    num_sampled = torch.zeros(count, dtype=torch.int32, device=device)
    draft_tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
    middle = torch.full((count,), MAX_STEPS // 2, device=device)
    temperature = rule.temperature(middle, MAX_STEPS, T_MIN, T_MAX)  # [R] fp32
    one = torch.ones((), device=device)

    def statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if logits.is_cuda:
            seed = int(torch.randint(0, 2**31 - 1, (1,)).item())
            return builtin.sample_row_stats(logits, temperature, length, seed, weight.dtype)
        return builtin.sample_row_stats_reference(logits, temperature, length, weight.dtype)

    def step(logits: Tensor) -> Outcome:
        states.step.fill_(MAX_STEPS // 2)
        states.is_encoder_phase.zero_()
        argmax, sample, entropy, probs = statistics(logits)
        builtin._compiled_sample_step(
            sample.view(count, length), argmax.view(count, length), entropy.view(count, length),
            probs.view(count, length, -1), slots, slots, slots, widths,
            states.canvas, states.argmax_canvas, states.step, states.is_encoder_phase,
            states.confident, states.self_conditioning_embeds, weight, one,
            states.accepted_canvas_history, states.accepted_canvas_history_len, states.max_steps,
            states.pin_mask, states.seed_canvas, states.read_only,
            sampled, num_sampled, draft_tokens,
            confidence_threshold=CONFIDENCE, vocab_size=shape.vocab_size, CL=length, ST=WINDOW,
            entropy_bound=ENTROPY_BOUND, sc_vocab_start=0, sc_vocab_end=shape.vocab_size,
            tp_size=1, tp_group_name="", compute_sc=True,
        )  # fmt: skip
        soft = states.self_conditioning_embeds.view(-1, shape.hidden)
        return Outcome(argmax, entropy, soft)

    return step


# --- times ---------------------------------------------------------------------------------------


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


def disagreement(ours: Outcome, builtin: Outcome, weight: Tensor) -> str:
    """What is wrong with ours, or nothing."""
    if not torch.equal(ours.argmax, builtin.argmax):
        return "other argmax tokens"
    worst = float((ours.entropy - builtin.entropy).abs().max())
    if not worst < ENTROPY_TOLERANCE:
        return f"entropies are {worst:.2g} apart"
    # In units of the largest embedding. Each rounds probabilities and result; ours leaves out its
    # budget.
    bound = skipped_mass(weight.dtype) + 2 * torch.finfo(weight.dtype).eps
    largest = float(weight.float().norm(dim=-1).max())
    error = float((ours.soft - builtin.soft).norm(dim=-1).max()) / largest
    return "" if error <= bound else f"soft embeddings are {error:.2g} apart, allowed {bound:.2g}"


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
    logits, weight = (
        make_logits(shape, device),
        make_embeddings(shape.vocab_size, shape.hidden, device),
    )
    prepared = {
        SPARSE: prepare_ours(shape, weight, False, is_compiled),
        EXACT: prepare_ours(shape, weight, True, is_compiled),
    }
    try:
        import_builtin()
    except ImportError as error:
        print(f"no built-in to compare with: {error}", file=sys.stderr)
    else:
        builtin = prepare_builtin(shape, weight)
        expected = builtin(logits)
        for name, ours in prepared.items():
            if problem := disagreement(ours(logits), expected, weight):
                raise RuntimeError(f"{name}, {shape}: {problem}")
        prepared[BUILTIN] = builtin
    steps = {name: functools.partial(step, logits) for name, step in prepared.items()}
    alternate(steps, 1, device)  # compiles
    times = alternate(steps, rounds, device)
    about = shape.num_rows, shape.vocab_size, shape.hidden, shape.profile
    timings = []
    for name in steps:
        faster = [b / a for a, b in zip(times[name], times.get(BUILTIN, []), strict=False)]
        spread = astuple(Spread.of(faster)) if faster else (None, None, None)
        timings.append(Timing(*about, name, 1e3 * statistics.median(times[name]), *spread))
    return timings


def show(timing: Timing) -> None:
    """One line for a human."""
    line = (
        f"{timing.rows:5} rows, vocabulary {timing.vocab_size:7}, hidden {timing.hidden:5}, "
        f"{timing.profile:8} {timing.implementation:13} {timing.p50_ms:10.1f} ms"
    )
    if timing.faster_than_builtin is not None:
        spread = timing.faster_low, timing.faster_high
        line += "  x{:.2f} [{:.2f} .. {:.2f}]".format(timing.faster_than_builtin, *spread)
    print(line, flush=True)


def sampling_step(results: Path) -> str:
    """Section of docs/sampling.md: milliseconds and ratios, a line for each shape and profile."""
    return section(results / "sampling_step_cpu.csv", "python -m bench.sampling_step", _table)


def _table(rows: Rows) -> str:
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
    return markdown((header, lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def profiles(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(PROFILES):
            raise argparse.ArgumentTypeError(f"{min(unknown)!r}; allowed: {', '.join(PROFILES)}")
        return names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=[64, 256])
    parser.add_argument("--vocab", type=numbers, default=[32_768, 262_144])
    parser.add_argument("--hidden", type=numbers, default=[256, 2816])
    parser.add_argument("--profiles", type=profiles, default=list(PROFILES))
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
    axes = (options.vocab, options.hidden, options.rows, options.profiles)
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
