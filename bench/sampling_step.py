"""The sampling step for `bench.kernels`: vLLM's built-in functions, and our denoise step.

From the logits of two canvases' rows to the next canvases, in the middle of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.context import Row, Rows
from bench.tables import grouped, markdown, spread_of

BUILTIN, SPARSE, EXACT = "built-in", "ours, sparse", "ours, exact"
T_MIN, T_MAX, MAX_STEPS, ENTROPY_BOUND, CONFIDENCE, STABILITY = 0.4, 0.8, 48, 0.1, 0.005, 2


class Outcome(NamedTuple):
    """What sampling steps have to agree on."""

    argmax: Tensor  # [N]
    entropy: Tensor  # [N]
    soft: Tensor  # [N, hidden] fp32, not yet scaled by sqrt(hidden)


Step = Callable[[Tensor], Outcome]  # from logits [N, V] fp32


def cases(smoke: bool, device: str) -> Iterator[tuple[Any, ...]]:
    """The fields of a `Case`: rows, vocabulary, size of embeddings, and how sure the rows are."""
    sizes = ([9000], [16], [8]) if smoke else ([32_768, 262_144], [256, 2816], [64, 256])
    for vocab, hidden, rows in itertools.product(*sizes):
        weight = torch.randn(vocab, hidden, device=device).mul_(hidden**-0.5).bfloat16()
        for profile in ("open", "settled"):
            logits = make_logits(rows, vocab, profile, device)
            about: Row = {"rows": rows, "vocab_size": vocab, "hidden": hidden, "profile": profile}
            builtin = partial(builtin_step(rows, weight), logits)
            runs = {BUILTIN: builtin}
            for name in (SPARSE, EXACT):
                runs[name] = partial(our_step(rows, weight, name == EXACT, not smoke), logits)
            yield about, runs, builtin, partial(disagree, weight)


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


def our_step(rows: int, weight: Tensor, is_exact: bool, is_compiled: bool) -> Step:
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
    state = CanvasState.allocate(made, len(starts), len(weight), weight.dtype, weight.device)
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


def builtin_step(rows: int, weight: Tensor) -> Step:
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


def disagree(weight: Tensor, builtin: Outcome, ours: Outcome) -> str:
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


def table(rows: Rows) -> str:
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
