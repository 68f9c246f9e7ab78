"""Times single kernels beside what else computes the same.

    python -m bench.kernels sampler                 # the sampling step; on a CPU, too
    python -m bench.kernels attention context       # on a GPU
    python -m bench.kernels --smoke                 # tiny, in Triton's interpreter: no conclusions

    attention   vLLM's Triton kernel, FlashAttention 4 and ours, on canvases of the 26B model's
                layers. The others have no anchored window: compare them on the symmetric one
    context     a drafter's context, of all its layers: vLLM's operations (one product, norm, RoPE,
                a cache write for each layer), and the one kernel of ``fused_context``
    sampler     everything between the logits of the canvas rows and the next canvas: vLLM's
                built-in functions, and our denoise step with each of its soft embeddings

Outputs are compared before anything is timed; if they differ by more than rounding, the exit code
is 1 and there is no row. Each round runs all of them, every other one in the opposite order.
``faster`` is the time of the first over that of this one, in the same round: median, smallest and
largest. A time on a GPU is the median of ``triton.testing.do_bench`` for a CUDA graph, with a cold
L2. Written to --results: NAME_DEVICE.csv, after every shape.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.context import GateError, Row, Rows, command_line, publish, reporting_failures
from bench.tables import grouped, markdown, spread_of
from dllm.attention.masks import QuerySpan, anchor

CANVAS = 256


class Case(NamedTuple):
    """Implementations of one shape, by name; each is called with nothing and returns its result.

    ``problem(expected(), result)`` says what is wrong with a result, or nothing. One of them may be
    what is expected.
    """

    about: dict[str, object]
    runs: Mapping[str, Callable[[], Any]]
    expected: Callable[[], Any]
    problem: Callable[[Any, Any], str]


# --- attention -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    is_anchored: bool = False
    page_size: int = 64  # keys of a page


SLIDING = Layer("sliding-anchored", 16, 8, 256, 1024, is_anchored=True)
SYMMETRIC = SLIDING._replace(name="sliding-symmetric", is_anchored=False)
FULL = Layer("full", 16, 2, 512, page_size=128)  # vLLM: as many bytes as a sliding layer's
DRAFTER = Layer("drafter", 32, 8, 128, page_size=16)


def attention_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Canvases behind a context: one request, then many."""
    if smoke:
        small = Layer("full", 4, 2, 32)
        for layer in (small, small._replace(name="sliding", window=16)):
            yield attention_case(layer, 2, 48, 8, torch.float32, device)
        return
    for batch, context in ((1, 65536), (1, 1024), (8, 8192), (8, 65536), (32, 1024), (32, 8192)):
        for layer in (FULL, SLIDING, SYMMETRIC):
            yield attention_case(layer, batch, context, CANVAS, torch.bfloat16, device)
        yield attention_case(DRAFTER, batch, context, 16, torch.bfloat16, device)


def attention_case(
    layer: Layer, batch: int, context: int, width: int, dtype: torch.dtype, device: str
) -> Case:
    """``batch`` canvases, each behind as much context; pages in random order."""
    from dllm.attention.canvas_attention import canvas_attention
    from dllm.attention.inputs import AttentionOptions, PagedKV, RaggedBatch
    from dllm.attention.reference import paged_attention

    length = context + width
    pages_each = -(-length // layer.page_size)
    shape = (batch * pages_each, layer.page_size, layer.num_kv_heads, 2 * layer.head_size)
    key, value = torch.randn(shape, dtype=dtype, device=device).split(layer.head_size, dim=-1)
    query = torch.randn(batch * width, layer.num_heads, layer.head_size, dtype=dtype, device=device)
    tables = torch.randperm(batch * pages_each, device=device).int().view(batch, pages_each)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    is_causal = torch.zeros(batch, dtype=torch.int32, device=device)
    span = QuerySpan(width, length, is_causal=False)
    first_keys = None
    if layer.is_anchored and layer.window is not None:
        first_key = anchor(span, layer.window)
        span, first_keys = replace(span, first_key=first_key), torch.full_like(lens, first_key)
    ragged = RaggedBatch(starts, lens, tables, is_causal, width, first_keys)
    options = AttentionOptions(layer.head_size**-0.5, layer.window)
    cache = PagedKV(key, value)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)

    def dllm() -> Tensor:
        canvas_attention(query, cache, ragged, options, ours)
        return ours

    def vllm_unified() -> Tensor:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        unified_attention(
            q=query, k=key, v=value, out=theirs, cu_seqlens_q=starts, max_seqlen_q=width,
            seqused_k=lens, max_seqlen_k=length, softmax_scale=options.scale, causal=is_causal,
            window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
            block_table=tables, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        return theirs

    def definition() -> Tensor:
        return torch.cat(paged_attention(query, key, value, tables, [span] * batch, options))

    runs: dict[str, Callable[[], Tensor]] = {}
    if device == "cuda" and not layer.is_anchored:
        from dllm.attention.flash import flash_attention, has_flash_attention
        from dllm.attention.visible_pages import VisiblePages

        def flash() -> Tensor:
            flash_attention(query, cache, shorter, options, theirs)
            return theirs

        runs["vllm_unified"] = vllm_unified
        if has_flash_attention() and torch.cuda.get_device_capability()[0] == 9:
            shorter = replace(ragged, max_seq_len=length, max_ahead=width - 1)
            if layer.window is not None:  # once a step, for all such layers
                sizes = layer.window, layer.page_size, batch, width
                shorter = VisiblePages(*sizes, query.device)(shorter)
            runs["flash_attention_4"] = flash
    runs["dllm"] = dllm
    about = {"layer": layer.name, "batch": batch, "context": context, "rows": width}
    return Case(about, runs, definition, functools.partial(_far_apart, dtype))


def _far_apart(dtype: torch.dtype, expected: Tensor, found: Tensor) -> str:
    """Rows may differ by the rounding of probabilities and of the result, and of sums."""
    gap = (expected - found.float()).norm(dim=-1) / expected.norm(dim=-1)
    allowed = 4 * torch.finfo(dtype).eps + 2e-5
    return "" if float(gap.max()) <= allowed else f"{float(gap.max()):.2g} apart; {allowed:.2g}"


# --- the context of a drafter --------------------------------------------------------------------


def context_cases(smoke: bool, device: str) -> Iterator[Case]:
    from bench.context_kv import cases

    return (Case(*case) for case in cases(smoke, device))


# --- the sampling step ---------------------------------------------------------------------------

BUILTIN, SPARSE, EXACT = "built-in", "ours, sparse", "ours, exact"
T_MIN, T_MAX, MAX_STEPS, ENTROPY_BOUND, CONFIDENCE, STABILITY = 0.4, 0.8, 48, 0.1, 0.005, 2


class Outcome(NamedTuple):
    """What sampling steps have to agree on."""

    argmax: Tensor  # [N]
    entropy: Tensor  # [N]
    soft: Tensor  # [N, hidden] fp32, not yet scaled by sqrt(hidden)


def sampler_cases(smoke: bool, device: str) -> Iterator[Case]:
    """Rows, vocabulary, size of embeddings, and how sure the rows are."""
    sizes = ([9000], [16], [8]) if smoke else ([32_768, 262_144], [256, 2816], [64, 256])
    for vocab, hidden, rows in itertools.product(*sizes):
        weight = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).bfloat16()
        for profile in ("open", "settled"):
            logits = make_logits(rows, vocab, profile, device)
            about: Row = {"rows": rows, "vocab_size": vocab, "hidden": hidden, "profile": profile}
            ours = {
                name: functools.partial(our_step(rows, weight, name == EXACT, not smoke), logits)
                for name in (SPARSE, EXACT)
            }
            builtin = functools.partial(builtin_step(rows, weight), logits)
            runs = {BUILTIN: builtin, **ours}
            yield Case(about, runs, builtin, functools.partial(_disagree, weight))


def make_logits(rows: int, vocab: int, profile: str, device: str) -> Tensor:
    """Made-up logits, ``[rows, vocab]`` fp32.

    ``open``: normal with a deviation of 3, as at a first step: thousands of tokens of a row have a
    probability that matters. ``settled``: a normal bulk around -8 with a deviation of 2.5, 20
    tokens around 8 and one at 22, so that few tokens matter.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, vocab, device=device).normal_(generator=generator)
    if profile == "open":
        return logits.mul_(3)
    ids = torch.randint(vocab, (rows, 21), generator=generator, device=device)
    likely = 8 + 2 * torch.randn(rows, 21, generator=generator, device=device)
    return logits.mul_(2.5).sub_(8).scatter_(1, ids, likely).scatter_(1, ids[:, :1], 22)


def our_step(
    rows: int, weight: Tensor, is_exact: bool, is_compiled: bool
) -> Callable[[Tensor], Outcome]:
    """Our step on two canvases, in the middle of the schedule."""
    from dllm.engine.canvas_rows import CanvasRows
    from dllm.engine.state import CanvasState
    from dllm.models.gemma.settings import GemmaSettings
    from dllm.models.gemma.step import denoise, step_state
    from dllm.ops.dispatch import sparse_soft_embeddings
    from dllm.ops.noise import initial_canvas
    from dllm.ops.soft_embedding import Shard, exact_product, skipped_mass
    from dllm.settings.denoising import NO_TOKEN

    length = rows // 2
    settings = GemmaSettings(
        length, MAX_STEPS, T_MIN, T_MAX, ENTROPY_BOUND, CONFIDENCE, STABILITY - 1, "symmetric"
    )
    starts = torch.zeros(2, dtype=torch.int64, device=weight.device)
    canvas_rows = CanvasRows.whole(starts, length)
    made: Any = SimpleNamespace(settings=settings, step_state=step_state(length), soft_size=None)
    state = CanvasState(made, len(starts), len(weight), weight.dtype, weight.device)
    for one in settings.parameters:
        state.parameters[one.name].fill_(getattr(settings, one.setting))
    state.steps_done.fill_(MAX_STEPS // 2)
    ids = initial_canvas(starts, starts, length, len(weight)).flatten()
    canvases = state.canvases(canvas_rows, ids, torch.full_like(ids, NO_TOKEN))
    shard, budget = Shard(weight, 0, len(weight)), skipped_mass(weight.dtype)
    decide = torch.compile(denoise, dynamic=True) if is_compiled else denoise

    def step(logits: Tensor) -> Outcome:
        dtype = torch.bfloat16 if is_exact else None
        done = decide(logits, canvas_rows, canvases, settings, dtype)
        stats = done.stats
        if stats.probs is None:
            soft = sparse_soft_embeddings(logits, done.temperature, stats, shard, budget)
        else:
            soft = exact_product(stats.probs, shard)
        return Outcome(stats.argmax, stats.entropy, soft.float())

    return step


def builtin_step(rows: int, weight: Tensor) -> Callable[[Tensor], Outcome]:
    """The built-in's step on two canvases: ``DiffusionSampler.__call__`` from its tile on."""
    from dllm.models.gemma import rule
    from dllm.patches.builtin import builtin

    (vocab, hidden), device, width = weight.shape, weight.device, rows // 2
    states = builtin.DiffusionGemmaRequestStates(
        2, width, vocab, MAX_STEPS, device, hidden, STABILITY
    )
    slots = torch.arange(2, device=device)
    widths = torch.full((2,), width, device=device)
    sampled = torch.zeros(2, width, dtype=torch.int32, device=device)
    num_sampled = torch.zeros(2, dtype=torch.int32, device=device)
    drafts = torch.zeros(2, width, dtype=torch.int64, device=device)
    middle = torch.full((2,), MAX_STEPS // 2, device=device)
    temperature = rule.temperature(middle, MAX_STEPS, T_MIN, T_MAX)
    one = torch.ones((), device=device)

    def step(logits: Tensor) -> Outcome:
        states.step.fill_(MAX_STEPS // 2)
        states.is_encoder_phase.zero_()
        given = (logits, temperature, width)
        if logits.is_cuda:
            found = builtin.sample_row_stats(*given, 1, weight.dtype)
        else:
            found = builtin.sample_row_stats_reference(*given, weight.dtype)
        argmax, sample, entropy, probs = found
        builtin._compiled_sample_step(
            sample.view(2, width), argmax.view(2, width), entropy.view(2, width),
            probs.view(2, width, -1), slots, slots, slots, widths,
            states.canvas, states.argmax_canvas, states.step, states.is_encoder_phase,
            states.confident, states.self_conditioning_embeds, weight, one,
            states.accepted_canvas_history, states.accepted_canvas_history_len, states.max_steps,
            states.pin_mask, states.seed_canvas, states.read_only, sampled, num_sampled, drafts,
            confidence_threshold=CONFIDENCE, vocab_size=vocab, CL=width, ST=STABILITY,
            entropy_bound=ENTROPY_BOUND, sc_vocab_start=0, sc_vocab_end=vocab, tp_size=1,
            tp_group_name="", compute_sc=True,
        )  # fmt: skip
        return Outcome(argmax, entropy, states.self_conditioning_embeds.view(-1, hidden))

    return step


def _disagree(weight: Tensor, builtin: Outcome, ours: Outcome) -> str:
    """The built-in sums p log p over the whole row in fp32: 1e-3 nats. Soft embeddings may differ
    by what ours leaves out and by the rounding of both, in units of the largest embedding."""
    from dllm.ops.soft_embedding import skipped_mass

    if not torch.equal(ours.argmax, builtin.argmax):
        return "other argmax tokens"
    if not (worst := float((ours.entropy - builtin.entropy).abs().max())) < 1e-3:
        return f"entropies are {worst:.2g} apart"
    allowed = skipped_mass(weight.dtype) + 2 * torch.finfo(weight.dtype).eps
    error = float((ours.soft - builtin.soft).norm(dim=-1).max())
    error /= float(weight.float().norm(dim=-1).max())
    return "" if error <= allowed else f"soft embeddings are {error:.2g} apart; {allowed:.2g}"


# --- times ---------------------------------------------------------------------------------------


CASES = {"attention": attention_cases, "context": context_cases, "sampler": sampler_cases}


def milliseconds(run: Callable[[], object], device: str) -> float:
    """The time of a call; on a GPU as a CUDA graph, with a cold L2 before each."""
    if device == "cpu":
        return 1e3 * timeit.timeit(run, number=1)
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=20, rep=100, return_mode="median"))


def measure(case: Case, rounds: int, device: str) -> list[Row]:
    """A row for each implementation.

    Raises:
        GateError: one computes something else than expected.
    """
    names = list(case.runs)
    expected = case.expected()
    for name, run in case.runs.items():
        if run is not case.expected and (problem := case.problem(expected, run())):
            raise GateError(f"{case.about}, {name}: {problem}")
    del expected  # may be large
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            times[name].append(milliseconds(case.runs[name], device))
    rows = []
    for name in names:
        faster = [a / b for a, b in zip(times[names[0]], times[name], strict=True)]
        own = {"implementation": name, "p50_ms": statistics.median(times[name])}
        own |= {"faster": statistics.median(faster)}
        rows.append(case.about | own | {"faster_low": min(faster), "faster_high": max(faster)})
    return rows


def sampler_table(rows: Rows) -> str:
    """Milliseconds and ratios at the most rows, a line for each shape and profile."""
    most = max((int(row["rows"]) for row in rows), default=0)
    rows = [row for row in rows if int(row["rows"]) == most]
    names, lines = [name for (name,) in grouped(rows, "implementation")], []
    for shape, here in grouped(rows, "rows", "vocab_size", "hidden", "profile").items():
        times = " / ".join(f"{float(row['p50_ms']):.1f}" for row in here)
        ends = ("faster", "faster_low", "faster_high")
        ours = [row for row in here if row["implementation"] != BUILTIN]
        faster = [spread_of([float(row[end]) for end in ends], 2) for row in ours]
        lines.append([shape[0], f"{int(shape[1]):,}", *shape[2:], times, *faster])
    heading = ["rows", "vocabulary", "hidden", "logits", f"ms: {' / '.join(names)}"]
    return markdown([*heading, *(f"built-in / {name}" for name in names if name != BUILTIN)], lines)


@reporting_failures
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, no conclusions")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if unknown := set(options.kernels) - set(CASES):
        parser.error(f"{min(unknown)}; allowed: {', '.join(CASES)}.")
    chosen = options.kernels or list(CASES)
    if device == "cpu" and not options.smoke and chosen != ["sampler"]:
        parser.error("there is no GPU; allowed: sampler, or --smoke.")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    for name in chosen:
        rows: list[Row] = []
        for case in CASES[name](options.smoke, device):
            for row in measure(case, 1 if options.smoke else options.rounds, device):
                print(*row.values(), flush=True)
                rows.append(row)
            publish(options.results / f"{name}_{device}.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
